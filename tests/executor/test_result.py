"""One sequence's result: outputs in order, one end, whoever reads."""

import asyncio
import threading

import pytest

from twostroke.executor.result import GenerationResult, OffsetCheck
from twostroke.protocol.errors import (
    EngineDeadError,
    ErrorInfo,
    ErrorKind,
    InternalRequestError,
    InvalidRequestError,
)
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens

KEY = SequenceKey(9)


class Aborts:
    """Counts how often a result gave its sequence up."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        """One more."""
        self.count += 1


def make_result(generated: int = 0, aborts: Aborts | None = None) -> GenerationResult:
    """A result whose request carries `generated` tokens of other workers."""
    request = GenerationRequest(
        key=KEY, prompt_ids=pack_tokens([1]), generated_ids=pack_tokens(range(generated)), sampling=SamplingParams()
    )
    return GenerationResult(request, (aborts or Aborts()).note)


def tokens(offset: int, *token_ids: int, final: bool = False) -> SequenceOutput:
    """An output with `token_ids` from `offset` on."""
    reason = FinishReason.LENGTH if final else None
    return SequenceOutput(KEY, offset, pack_tokens(token_ids), finish_reason=reason)


def failure(offset: int = 0) -> SequenceOutput:
    """An output that ends the sequence with an error."""
    return SequenceOutput(KEY, offset, error=ErrorInfo(ErrorKind.INVALID, "too long", "prompt"))


def test_outputs_are_joined_into_a_completion() -> None:
    """Tokens, logprobs, cached tokens and the reason for the end."""
    result = make_result()
    result.feed(SequenceOutput(KEY, 0, pack_tokens([5]), logprobs=(TokenLogprobs(-1.0),), cached_tokens=16))
    result.feed(SequenceOutput(KEY, 1, pack_tokens([6, 7]), logprobs=(TokenLogprobs(-2.0), TokenLogprobs(-3.0))))
    result.feed(SequenceOutput(KEY, 3, finish_reason=FinishReason.STOP, stop_token_id=2))
    completion = result.wait(1)
    assert completion.token_ids == [5, 6, 7]
    assert [entry.chosen for entry in completion.logprobs] == [-1.0, -2.0, -3.0]
    assert (completion.cached_tokens, completion.finish_reason, completion.stop_token_id) == (16, FinishReason.STOP, 2)


def test_offsets_start_after_the_generated_tokens_of_the_request() -> None:
    """A resumed sequence goes on where another worker stopped."""
    result = make_result(generated=3)
    result.feed(tokens(3, 8, final=True))
    assert result.wait(1).token_ids == [8]


def test_a_repeated_output_is_dropped() -> None:
    """By its offset."""
    result = make_result()
    for part in (tokens(0, 5), tokens(0, 5), tokens(1, 6, final=True)):
        result.feed(part)
    assert result.wait(1).token_ids == [5, 6]


def test_a_gap_fails_the_result_and_gives_the_sequence_up() -> None:
    """Lost tokens are never passed over; the message says which."""
    aborts = Aborts()
    result = make_result(aborts=aborts)
    result.feed(tokens(0, 5))
    result.feed(tokens(3, 8))
    with pytest.raises(InternalRequestError, match="tokens 1 to 2 were lost"):
        result.wait(1)
    assert aborts.count == 1


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_an_error_ends_the_result_whatever_its_offset(offset: int) -> None:
    """A worker that fails a sequence may not know how far it came."""
    aborts = Aborts()
    result = make_result(aborts=aborts)
    result.feed(tokens(0, 5))
    result.feed(failure(offset))
    with pytest.raises(InvalidRequestError, match="too long") as raised:
        result.wait(1)
    assert raised.value.param == "prompt"
    assert aborts.count == 0


def test_nothing_follows_the_final_output() -> None:
    """Neither tokens nor errors."""
    result = make_result()
    result.feed(tokens(0, 5, final=True))
    result.feed(tokens(1, 6))
    result.fail(EngineDeadError("late"))
    assert result.wait(1).token_ids == [5]


def test_the_first_error_is_sticky() -> None:
    """Every later read raises it again, and no other."""
    result = make_result()
    result.fail(EngineDeadError("first"))
    result.fail(EngineDeadError("second"))
    result.feed(tokens(0, 5, final=True))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="first"):
            result.wait(1)


def test_outputs_before_an_error_are_still_read() -> None:
    """A stream shows what it got, then the error."""
    result = make_result()
    result.feed(tokens(0, 5))
    result.fail(EngineDeadError("gone"))
    reading = iter(result)
    assert next(reading).token_ids == pack_tokens([5])
    with pytest.raises(EngineDeadError, match="gone"):
        next(reading)


def test_waiting_too_long_aborts() -> None:
    """The caller's deadline is the sequence's end."""
    aborts = Aborts()
    result = make_result(aborts=aborts)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        result.wait(0.01)
    assert aborts.count == 1


def test_aborting_an_ended_result_does_nothing() -> None:
    """There is nothing to give up."""
    aborts = Aborts()
    result = make_result(aborts=aborts)
    result.feed(tokens(0, 5, final=True))
    result.abort()
    assert aborts.count == 0


def test_a_thread_iterates_while_another_feeds() -> None:
    """Blocking iteration ends with the final output."""
    result = make_result()

    def feed() -> None:
        for offset in range(100):
            result.feed(tokens(offset, offset, final=offset == 99))

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert [output.offset for output in result] == list(range(100))
    feeder.join()


async def test_a_coroutine_iterates_while_a_thread_feeds() -> None:
    """The feeder wakes the reader's loop once for each batch."""
    result = make_result()
    loop = asyncio.get_running_loop()

    def feed() -> None:
        for offset in range(100):
            result.feed(tokens(offset, offset, final=offset == 99))
            loop.call_soon_threadsafe(result.wake)

    feeder = asyncio.to_thread(feed)
    fed = asyncio.ensure_future(feeder)
    assert [output.offset async for output in result] == list(range(100))
    await fed


async def test_a_cancelled_reader_leaves_the_result_readable() -> None:
    """The next reader gets everything."""
    result = make_result()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(result.next_output(), 0.01)
    result.feed(tokens(0, 5, final=True))
    result.wake()
    assert (await result.completion()).token_ids == [5]


def test_tokens_alone_may_be_taken_as_one_buffer() -> None:
    """Of all outputs that wait; not the first, which tells of the cache, nor the end, nor what waits with those."""
    result = make_result()
    assert result.take_tokens() == b""
    result.feed(SequenceOutput(KEY, 0, pack_tokens([5]), cached_tokens=0))
    result.feed(tokens(1, 6))
    assert result.take_tokens() == b""
    assert [output.offset for output in result.take_waiting()] == [0, 1]
    result.feed(tokens(2, 7))
    result.feed(tokens(3, 8, 9))
    assert result.take_tokens() == pack_tokens([7, 8, 9])
    assert result.take_waiting() == []
    result.feed(SequenceOutput(KEY, 5, pack_tokens([4]), logprobs=(TokenLogprobs(-1.0),)))
    assert result.take_tokens() == b""
    assert len(result.take_waiting()) == 1
    result.feed(tokens(6, 4))
    result.feed(tokens(7, 3, final=True))
    assert result.take_tokens() == b""
    assert [output.offset for output in result.take_waiting()] == [6, 7]


def test_tokens_before_a_failure_are_left_to_who_hears_of_it() -> None:
    """Taken away as a buffer, nobody would be told of the rest."""
    result = make_result()
    result.feed(tokens(0, 5))
    result.fail(EngineDeadError("gone"))
    assert result.take_tokens() == b""
    assert len(result.take_waiting()) == 1


def test_an_empty_final_output_needs_the_expected_offset() -> None:
    """It carries no tokens, so that a repeat cannot end a sequence early."""
    check = OffsetCheck(2)
    assert check.accept(tokens(2, 8))
    assert not check.accept(tokens(2, final=True))
    assert check.accept(tokens(3, final=True))
