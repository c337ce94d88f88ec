"""Incremental decoding gives, piece by piece, exactly what decoding everything at once gives."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.text_models import WORDS, byte_fallback_tokenizer
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from twostroke.frontend.detokenizer import REPLACEMENT, Detokenizer
from twostroke.frontend.tokenizer import TextModel

BYTE_LEVEL = TextModel(tiny_tokenizer())


BYTE_FALLBACK = TextModel(byte_fallback_tokenizer())


def cut(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`token_ids` in pieces that end at `cuts`."""
    bounds = sorted({0, len(token_ids), *(place % (len(token_ids) + 1) for place in cuts)})
    return [token_ids[start:end] for start, end in itertools.pairwise(bounds)]


def stream(text: TextModel, pieces: list[list[int]]) -> list[str]:
    """What each piece gives, and at last what was held back."""
    detokenizer = text.detokenizer()
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=60),
)
def test_byte_level_streams_equal_one_decode(token_ids: list[int], cuts: list[int]) -> None:
    """Random ids: special tokens, ids beyond the vocabulary, and bytes that are no UTF-8 included."""
    assert "".join(stream(BYTE_LEVEL, cut(token_ids, cuts))) == BYTE_LEVEL.decode(token_ids)


@given(
    token_ids=st.lists(st.integers(0, len(WORDS) + 256 + 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=60),
)
def test_byte_fallback_streams_equal_one_decode(token_ids: list[int], cuts: list[int]) -> None:
    """Here one wrong byte turns a whole run of byte tokens into replacement characters."""
    assert "".join(stream(BYTE_FALLBACK, cut(token_ids, cuts))) == BYTE_FALLBACK.decode(token_ids)


@given(text=st.text(max_size=40))
def test_real_text_never_shows_a_replacement_character(text: str) -> None:
    """Token by token, no piece shows half a character, and the whole text comes back."""
    pieces = stream(BYTE_LEVEL, [[token] for token in BYTE_LEVEL.encode(text, add_special_tokens=False)])
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("text", ["日本語", "👩‍👩‍👧‍👦 family", "e\u0301té", "  two  spaces ", "a\n\n\tb"])
def test_multi_byte_text_streams_as_it_is(text: str) -> None:
    """Characters over several tokens, joined emoji, combining marks and white space."""
    pieces = stream(BYTE_LEVEL, [[token] for token in BYTE_LEVEL.encode(text, add_special_tokens=False)])
    assert "".join(pieces) == text


def test_each_character_leaves_with_its_last_token() -> None:
    """Nothing waits longer than it has to: three byte tokens of one character, then the character."""
    token_ids = BYTE_LEVEL.encode("日x", add_special_tokens=False)
    assert stream(BYTE_LEVEL, [[token] for token in token_ids]) == ["", "", "日", "x", ""]


def test_a_character_cut_off_at_the_end_shows_as_the_decoder_shows_it() -> None:
    """The output ended inside a character: the final text has a replacement character, and so has the stream."""
    token_ids = BYTE_LEVEL.encode("a日", add_special_tokens=False)[:-1]
    assert stream(BYTE_LEVEL, [[token] for token in token_ids]) == ["a", "", "", REPLACEMENT]


def test_a_leading_space_is_kept_after_the_first_word() -> None:
    """The decoder strips one leading space of a text, not of each piece; special tokens in between change nothing."""
    special, hello, world = (WORDS.index(word) for word in ("<s>", "▁hello", "▁world"))
    assert stream(BYTE_FALLBACK, [[special], [hello], [special], [world]]) == ["", "hello", "", " world", ""]


def test_a_long_run_of_special_tokens_is_not_decoded_again_and_again() -> None:
    """Benchmarks ignore the end-of-sequence token; the window must not grow with what has no text."""
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.push(BYTE_LEVEL.encode("ab", add_special_tokens=False))
    for _ in range(1000):
        assert detokenizer.push([0]) == ""
    assert len(detokenizer._window) <= 2


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    """A model may make wrong bytes for ever: all but the last, which may begin a character, leave as they come."""
    detokenizer = Detokenizer(BYTE_LEVEL)
    start = next(token for token in range(VOCAB_SIZE) if BYTE_LEVEL.token_bytes(token) == b"\xe2")
    for _ in range(100):
        detokenizer.push([start])
        assert len(detokenizer._window) <= 3
    assert detokenizer.finish() == REPLACEMENT
