"""Streamed text is what `transformers` decodes from the same tokens at once, whatever the pieces they came in."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.text_models import byte_fallback_tokenizer, save_tokenizer, word_piece_tokenizer
from tests.support.tiny_tokenizer import save_tiny_tokenizer
from twostroke.cli.model import demo
from twostroke.frontend.detokenizer import REPLACEMENT
from twostroke.frontend.tokenizer import TextModel

TEXTS = (
    "The quick brown fox isn't here, is it ? 's ' re",
    "日本語と한국어, Привет, שלום, ไทย",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️‍🔥 family",
    "e\u0301te\u0301 a\u0308 ﷽ \u200b\u202e",
    "a\x00b\r\n\t c   d\u00a0e",
    "\ufffd already broken \ufffd\ufffd",
    "hello world hello<tool>hello </s> 日a\U0001f9d1\u200d\U0001f680",
)
"""Combining marks, joined emoji, flags, control characters, replacement characters of the text's own."""


@dataclass(frozen=True)
class Pair:
    """A model's text side, ours and that of `transformers`."""

    ours: TextModel
    reference: PreTrainedTokenizerBase
    size: int

    @classmethod
    def of(cls, folder: Path) -> "Pair":
        """Read both from `folder`."""
        reference = AutoTokenizer.from_pretrained(folder)
        return cls(TextModel.load(folder), reference, len(reference))


KINDS = ("byte level", "byte fallback", "cleaned words", "demo")


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One model of each kind."""
    if request.param == "demo":
        return Pair.of(demo.fetch(print))
    folder = tmp_path_factory.mktemp("model")
    if request.param == "byte level":
        save_tiny_tokenizer(folder)
    elif request.param == "byte fallback":
        # `tokenizer.json` decides: `add_bos_token` changes nothing.
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        save_tokenizer(folder, byte_fallback_tokenizer(), add_bos_token=True, **names)
    else:
        save_tokenizer(folder, word_piece_tokenizer(), clean_up_tokenization_spaces=True)
    return Pair.of(folder)


def streamed(pair: Pair, token_ids: list[int], cuts: list[int]) -> list[str]:
    """The pieces of text of `token_ids` that arrive cut at `cuts`, and at last what was held back."""
    bounds = sorted({0, len(token_ids), *(place % (len(token_ids) + 1) for place in cuts)})
    stream = pair.ours.detokenizer()
    return [*(stream.push(token_ids[start:end]) for start, end in itertools.pairwise(bounds)), stream.finish()]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_random_tokens_stream_as_they_decode(pair: Pair, data: st.DataObject) -> None:
    """Bytes that are no text, special tokens, ids that the tokenizer does not know; each piece is final."""
    token_ids = data.draw(st.lists(st.integers(0, pair.size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40))
    known = [token for token in token_ids if token < pair.size]
    expected = pair.reference.decode(known, skip_special_tokens=True)
    assert "".join(streamed(pair, token_ids, cuts)) == expected


@settings(deadline=None, max_examples=100)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)), cuts=st.lists(st.integers(0, 200), max_size=30))
def test_text_streams_as_it_decodes(pair: Pair, text: str, cuts: list[int]) -> None:
    """Encoded as `transformers` encodes it, never with a replacement character that the whole text does not have."""
    token_ids = pair.ours.encode(text, add_special_tokens=True)
    assert token_ids == pair.reference.encode(text)
    expected = pair.reference.decode(token_ids, skip_special_tokens=True)
    one_by_one = streamed(pair, token_ids, list(range(len(token_ids))))
    assert "".join(one_by_one) == "".join(streamed(pair, token_ids, cuts)) == expected
    assert sum(piece.count(REPLACEMENT) for piece in one_by_one) == expected.count(REPLACEMENT)


@pytest.mark.parametrize("text", TEXTS)
def test_both_ways_of_decoding_agree_with_transformers(pair: Pair, text: str) -> None:
    """With special tokens (as `/detokenize` gives it) and without (as answers are)."""
    token_ids = pair.reference.encode(text)
    for skip in (False, True):
        expected = pair.reference.decode(token_ids, skip_special_tokens=skip)
        assert pair.ours.whole_text(token_ids, skip_special_tokens=skip) == expected


def test_special_tokens_that_only_the_configuration_names_are_special(tmp_path: Path) -> None:
    """`transformers` adds them, so they have an id, are never split, and are no text."""
    declared = {"300": {"content": "<think>", "special": False}, "301": {"content": "<sep>", "special": True}}
    save_tokenizer(
        tmp_path,
        byte_fallback_tokenizer(),
        eos_token={"content": "<end>", "lstrip": False, "special": True, "__type": "AddedToken"},
        added_tokens_decoder=declared,
        additional_special_tokens=["<more>"],
        chat_template="{{ eos_token }}",
    )
    pair = Pair.of(tmp_path)
    text = "hello<end><think>a<sep><more>"
    token_ids = pair.reference.encode(text)
    assert pair.ours.encode(text, add_special_tokens=True) == token_ids
    assert "".join(streamed(pair, token_ids, [])) == pair.reference.decode(token_ids, skip_special_tokens=True)
