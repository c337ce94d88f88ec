"""From outputs to pieces: stop tokens, stop strings and `min_tokens`, counts, logprobs that wait for their text."""

import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer
from twostroke.frontend.output import OutputOptions, OutputText, Piece
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InternalRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.tokens import pack_tokens

TEXT = TextModel(tiny_tokenizer())
KEY = SequenceKey(1)


def ids(text: str) -> list[int]:
    """The tokens of `text`."""
    return TEXT.encode(text, add_special_tokens=False)


def output(token_ids: list[int], **fields: object) -> SequenceOutput:
    """An output; its offset does not matter here."""
    return SequenceOutput(KEY, 0, pack_tokens(token_ids), **fields)  # type: ignore[arg-type] # fields by name


def test_the_stop_token_is_counted_but_not_shown() -> None:
    """Also one that is no special token: the client named it as an end, not as text."""
    text = OutputText(TEXT, OutputOptions())
    stop = ids("x")[0]
    piece = text.add([output([*ids("ab"), stop], finish_reason=FinishReason.STOP, stop_token_id=stop)])
    assert (piece.text, piece.finish_reason) == ("ab", FinishReason.STOP)
    assert text.token_count == len(ids("ab")) + 1


def test_the_same_token_before_the_end_is_shown() -> None:
    """Only the last token is the stop token; `min_tokens` may have let one pass before."""
    text = OutputText(TEXT, OutputOptions(stop=("zzz",)))
    stop = ids("x")[0]
    piece = text.add([output([stop, *ids("a"), stop], finish_reason=FinishReason.STOP, stop_token_id=stop)])
    assert piece.text == "xa"


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    """The count must not depend on how many tokens travelled in one message."""
    token_ids = [*ids("a"), *ids("#"), *ids("b"), *ids("c")]
    counts = []
    for pieces in ([token_ids], [[token] for token in token_ids]):
        text = OutputText(TEXT, OutputOptions(stop=("#",)))
        shown = "".join(text.add([output(piece)]).text for piece in pieces)
        assert (shown, text.finish_reason, text.stopped_by_string) == ("a", FinishReason.STOP, True)
        counts.append(text.token_count)
    assert counts == [2, 2]


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    """The first `min_tokens` tokens are text whatever they spell."""
    text = OutputText(TEXT, OutputOptions(stop=("#",), min_tokens=2))
    assert text.add([output([*ids("#"), *ids("#")])]).text == "##"
    assert text.add([output([*ids("a"), *ids("#")])]).finish_reason is FinishReason.STOP
    assert text.token_count == 4


def test_a_stop_string_completed_by_the_last_held_characters_counts() -> None:
    """The output ends by length while half a character is held; what it shows then completes the stop string."""
    text = OutputText(TEXT, OutputOptions(stop=("a\ufffd",)))
    piece = text.add([output([*ids("xa"), *ids("日")[:2]], finish_reason=FinishReason.LENGTH)])
    assert (piece.text, piece.finish_reason) == ("x", FinishReason.STOP)


def test_held_text_leaves_with_the_end() -> None:
    """It was the start of a stop string that never came."""
    text = OutputText(TEXT, OutputOptions(stop=("END",)))
    assert text.add([output(ids("EN"))]) == Piece()
    assert text.add([output([], finish_reason=FinishReason.LENGTH)]).text == "EN"


def test_logprobs_wait_for_the_text_of_their_tokens() -> None:
    """Half a character makes no piece; its token's logprobs come with the rest of it."""
    text = OutputText(TEXT, OutputOptions())
    first, second, third = ids("日")
    scores = [TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0)]
    assert text.add([output([first, second], logprobs=tuple(scores[:2]))]).text == ""
    piece = text.add([output([third], logprobs=(scores[2],))])
    assert piece.text == "日"
    assert [(token.token_id, token.logprobs, token.offset) for token in piece.tokens] == [
        (first, scores[0], 0),
        (second, scores[1], 0),
        (third, scores[2], 0),
    ]


def test_a_hand_over_that_nobody_takes_is_an_error() -> None:
    """Only a router may see one."""
    with pytest.raises(InternalRequestError, match="was handed over, but nobody takes it on"):
        OutputText(TEXT, OutputOptions()).add([output([], finish_reason=FinishReason.HANDOVER)])
