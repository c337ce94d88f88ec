"""The result of one submitted sequence: a queue of outputs with one end.

    open --feed(output)--> open
    open --feed(final output)--> finished        (nothing follows)
    open --fail(error) or a gap in offsets--> failed   (the error is sticky: every later read raises it)

Outputs carry the offset of their first token. A repeat (a message that another worker's retry made useless) is dropped;
a gap means that tokens were lost and fails the result.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from twostroke.protocol.errors import InternalRequestError, TwostrokeError, from_info
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.tokens import TOKEN_BYTES, token_count, unpack_tokens
from twostroke.protocol.transfer import ContextPhaseParams


@dataclass(slots=True)
class Completion:
    """Everything that one sequence produced.

    Attributes:
        token_ids: Output tokens that this request made (`generated_ids` not included).
        logprobs: One entry a token, if asked for.
        finish_reason: Why it ended.
        stop_token_id: Which stop token ended it, if one did.
        cached_tokens: Prompt tokens found in the prefix cache.
        context_phase_params: Set if the sequence goes on elsewhere.
        prompt_logprobs: Of all prompt tokens but the first, if asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    context_phase_params: ContextPhaseParams | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def add(self, output: SequenceOutput) -> None:
        """Append one output."""
        self.token_ids.extend(unpack_tokens(output.token_ids))
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_token_id = output.stop_token_id
            self.context_phase_params = output.context_phase_params


class OffsetCheck:
    """Sees that token offsets go on without gap or repeat.

    Args:
        start: Offset of the first token expected.
    """

    def __init__(self, start: int) -> None:
        self.expected = start

    def accept(self, output: SequenceOutput) -> bool:
        """True to take `output`; False to drop it as a repeat.

        Raises:
            InternalRequestError: Tokens before `output` are missing.
        """
        if output.offset == self.expected:
            self.expected += len(output.token_ids) // TOKEN_BYTES
            return True
        if output.offset > self.expected:
            raise _lost(output, self.expected)
        return False


def _only_tokens(output: SequenceOutput) -> bool:
    return output.finish_reason is None and output.logprobs is None and output.cached_tokens is None


def _lost(output: SequenceOutput, expected: int) -> InternalRequestError:
    return InternalRequestError(f"sequence {output.key}: tokens {expected} to {output.offset - 1} were lost on the way")


class GenerationResult:
    """Receives the outputs of one sequence and gives them to one reader.

    Read it in one of three ways: `async for output in result`, `for output in result` (a blocking iteration), or
    `wait()` for the whole. Fed from any thread; awaited on the loop that the first reader runs on.
    """

    def __init__(self, request: GenerationRequest, abort: Callable[[], None]) -> None:
        self.request = request
        self._abort = abort
        self._expected = token_count(request.generated_ids)  # offset of the next token
        self._outputs: deque[SequenceOutput] = deque()
        self._lock = threading.RLock()
        self._changed: threading.Condition | None = None  # there once a thread has blocked
        self._finished = False
        self._error: TwostrokeError | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that a reader awaits on, or that has a subscriber, once there is one."""
        self._waiter: asyncio.Future[None] | None = None
        self._on_wake: Callable[[], None] | None = None
        self._wakes_at_end = False
        self.began_s: float | None = None
        """When the first output came, in seconds of the monotonic clock."""

    @property
    def key(self) -> SequenceKey:
        """The sequence's key."""
        return self.request.key

    @property
    def done(self) -> bool:
        """Whether the final event has arrived (outputs may still wait to be read)."""
        return self._finished or self._error is not None

    def feed(self, output: SequenceOutput) -> None:
        """Take one output; see `ResultSink`. A gap also gives the sequence up: what follows would be of no use."""
        with self._lock:
            if self._finished or self._error is not None:
                return
            if output.error is not None:
                self._end(from_info(output.error))
                return
            if output.offset == self._expected:
                self._expected += len(output.token_ids) // TOKEN_BYTES
                if self.began_s is None:
                    self.began_s = time.monotonic()
                self._outputs.append(output)
                self._finished = output.finish_reason is not None
                if self._changed is not None:
                    self._changed.notify_all()
                return
            if output.offset < self._expected:
                return
            self._end(_lost(output, self._expected))
        self._abort()

    def fail(self, error: TwostrokeError) -> None:
        """End with `error`, unless ended already."""
        with self._lock:
            if not self.done:
                self._end(error)

    def subscribe(self, on_wake: Callable[[], None], *, at_end: bool = False) -> None:
        """Have `on_wake` called on the running loop whenever there is something new for `take_waiting`.

        Takes the place of an awaiting reader, without a change of task for each batch of outputs.

        Args:
            on_wake: Called.
            at_end: Only once the sequence has ended.
        """
        self.loop = asyncio.get_running_loop()
        self._on_wake = on_wake
        self._wakes_at_end = at_end

    def unsubscribe(self) -> None:
        """Call the subscriber no longer."""
        self._on_wake = None

    def wake(self) -> None:
        """Resume the awaiting reader, or call the subscriber; on the loop's thread."""
        if self._on_wake is not None:
            if not self._wakes_at_end or self.done:
                self._on_wake()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Give the sequence up; nothing happens if it has ended."""
        if not self.done:
            self._abort()

    def _end(self, error: TwostrokeError) -> None:
        self._error = error
        if self._changed is not None:
            self._changed.notify_all()

    def _take(self) -> SequenceOutput | None:
        """The next output, or None if none waits.

        Raises:
            TwostrokeError: The sticky error, once all outputs before it were read.
        """
        with self._lock:
            if self._outputs:
                return self._outputs.popleft()
            if self._error is not None:
                raise self._error
            return None

    async def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        while True:
            output = await self.next_output()
            if output is None:
                return
            yield output

    async def next_output(self) -> SequenceOutput | None:
        """The next output, or None after the final one.

        Raises:
            TwostrokeError: The sequence failed.
        """
        self.loop = asyncio.get_running_loop()
        while True:
            # The waiter exists before the queue is looked at, so that a feed in between is not missed.
            self._waiter = self.loop.create_future()
            with self._lock:
                ended = self._finished and not self._outputs
                output = None if ended else self._take()
            if ended or output is not None:
                self._waiter = None
                return output
            await self._waiter

    def take_waiting(self) -> list[SequenceOutput]:
        """All outputs that wait to be read now, perhaps none.

        Raises:
            TwostrokeError: The sequence failed, and all outputs before that were read.
        """
        with self._lock:
            if not self._outputs:
                if self._error is not None:
                    raise self._error
                return []
            waiting = list(self._outputs)
            self._outputs.clear()
        if self._error is not None and self.loop is not None and self._on_wake is not None:
            self.loop.call_soon(self._on_wake)  # nobody else comes to tell of the error that is left
        return waiting

    def take_tokens(self) -> bytes:
        """The tokens of all outputs that wait to be read now, as int32 buffer.

        Returns:
            b"" if nothing waits, or if anything is to be told besides tokens, an end or a failure say: then all of it
            goes on waiting for `take_waiting`.
        """
        outputs = self._outputs
        if len(outputs) == 1 and self._error is None:  # nearly always
            output = outputs[0]
            # `_only_tokens`, without the call: most tokens of most streams pass here.
            if output.finish_reason is None and output.logprobs is None and output.cached_tokens is None:
                return outputs.popleft().token_ids  # nobody but this reader takes any, so that one needs no lock
            return b""
        with self._lock:
            if self._error is not None or not all(map(_only_tokens, outputs)):
                return b""
            tokens = b"".join([output.token_ids for output in outputs])
            outputs.clear()
        return tokens

    def __iter__(self) -> Iterator[SequenceOutput]:
        while True:
            self._block(lambda: bool(self._outputs) or self.done, None)
            output = self._take()
            if output is None:
                return
            yield output

    def _block(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block this thread until something is so; False if it was not in time."""
        with self._lock:
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            return self._changed.wait_for(until, timeout_s)

    def wait(self, timeout_s: float | None = None) -> Completion:
        """Block until the end and return everything.

        Raises:
            TwostrokeError: The sequence failed.
            TimeoutError: It did not end in time; it is aborted.
        """
        if not self._block(lambda: self.done, timeout_s):
            self._abort()
            raise TimeoutError(f"sequence {self.key} did not end within {timeout_s} s; it was aborted")
        completion = Completion()
        while (output := self._take()) is not None:
            completion.add(output)
        return completion

    async def completion(self) -> Completion:
        """Await the end and return everything; errors as `wait`, without a timeout."""
        completion = Completion()
        async for output in self:
            completion.add(output)
        return completion
