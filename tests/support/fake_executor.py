"""A `GenerationExecutor` that answers with scripted tokens, with delays and failures on request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError, TwostrokeError
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.tokens import pack_tokens, unpack_tokens


@dataclass(slots=True)
class Script:
    """What the executor does with every request.

    Attributes:
        steps: Token ids of each engine step; a request's `max_tokens` cuts them off.
        finish_reason: Of the last step, unless `max_tokens` came first.
        stop_token_id: Reported with the last step.
        error: Fails the request after the last step, instead of finishing it.
        refusal: Raised by `submit_to`.
        cached_tokens: Reported with the first step.
        pause_s: Before each step.
        hold: Steps after the first so many wait until `release` is called; None holds nothing.
    """

    steps: Sequence[Sequence[int]] = ((10,), (11,), (12,))
    finish_reason: FinishReason = FinishReason.STOP
    stop_token_id: int | None = None
    error: TwostrokeError | None = None
    refusal: TwostrokeError | None = None
    cached_tokens: int = 0
    pause_s: float = 0.0
    hold: int | None = None


@dataclass(slots=True)
class _Play:
    request: GenerationRequest
    sink: ResultSink
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Calls:
    """What was asked of the executor."""

    requests: list[GenerationRequest] = field(default_factory=list)
    aborts: list[tuple[int, int | None]] = field(default_factory=list)
    completed: list[tuple[int, int | None]] = field(default_factory=list)


class FakeExecutor(GenerationExecutor):
    """Plays `script` on the running loop.

    Args:
        script: What to do.
        model: What to serve.

    Attributes:
        room: Requests at the same time at most; None for any number.
        full: Raised beyond that.
    """

    def __init__(self, script: Script | None = None, model: ServedModel | None = None) -> None:
        self.script = script or Script()
        self.served = model or ServedModel("tiny", max_model_len=256, vocab_size=320, eos_token_ids=(0,))
        self.health = Health(HealthState.READY)
        self.calls = Calls()
        self.room: int | None = None
        self.full = OverloadedError("no room for more")
        self._ids = ClientIds(7)
        self._plays: dict[SequenceKey, _Play] = {}
        self._released = asyncio.Event()

    @property
    def model(self) -> ServedModel:
        """The served model, unless the executor is dead."""
        if self.health.state is HealthState.DEAD:
            raise EngineDeadError(self.health.reason)
        return self.served

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._plays)

    def draw_client_id(self) -> int:
        """The next id."""
        return self._ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """Start playing the script to each of `sinks`."""
        if self.script.refusal is not None:
            raise self.script.refusal
        if self.room is not None and self.running + request.n > self.room:
            raise self.full
        self.calls.requests.append(request)
        for one, sink in zip(request.sequences(), sinks, strict=True):
            play = _Play(one, sink)
            self._plays[one.key] = play
            play.task = asyncio.get_running_loop().create_task(self._run(play))

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """Fail the request's sink with `AbortedError`."""
        self.calls.aborts.append((client_id, index))
        for key, play in list(self._plays.items()):
            if key.client_id == client_id and index in (None, key.index):
                self._end(play, AbortedError("aborted"))

    def complete_request(self, client_id: int, index: int | None = None) -> None:
        """Note it and abort."""
        self.calls.completed.append((client_id, index))
        self.abort_request(client_id, index)

    def check_health(self) -> Health:
        """As set."""
        return self.health

    def shutdown(self, deadline_s: float | None = None) -> None:
        """Die."""
        del deadline_s
        self.die("shut down")

    def release(self) -> None:
        """Let held steps go on."""
        self._released.set()

    def fail(self, key: SequenceKey, error: TwostrokeError) -> None:
        """End one request with `error`."""
        self._end(self._plays[key], error)

    def die(self, reason: str) -> None:
        """Fail everything, as an executor does whose worker was killed."""
        self.health = Health(HealthState.DEAD, reason)
        for play in list(self._plays.values()):
            self._end(play, EngineDeadError(reason))

    def _end(self, play: _Play, error: TwostrokeError) -> None:
        del self._plays[play.request.key]
        if play.task is not None:
            play.task.cancel()
        play.sink.fail(error)
        play.sink.wake()

    async def _run(self, play: _Play) -> None:
        script, sampling = self.script, play.request.sampling
        limit = sampling.max_tokens or self.served.max_model_len
        offset = 0
        for number, step in enumerate(script.steps):
            await asyncio.sleep(script.pause_s)
            if script.hold is not None and number >= script.hold:
                await self._released.wait()
            tokens = list(step)[: limit - offset]
            full = offset + len(tokens) >= limit
            last = full or (number == len(script.steps) - 1 and script.error is None)
            reason = (FinishReason.LENGTH if full else script.finish_reason) if last else None
            if last:
                del self._plays[play.request.key]
            play.sink.feed(
                SequenceOutput(
                    play.request.key,
                    offset,
                    pack_tokens(tokens),
                    logprobs=self._logprobs(tokens, sampling.logprobs),
                    finish_reason=reason,
                    stop_token_id=script.stop_token_id if reason is FinishReason.STOP else None,
                    cached_tokens=script.cached_tokens if number == 0 else None,
                    prompt_logprobs=self._prompt_logprobs(play.request) if number == 0 else None,
                )
            )
            play.sink.wake()
            offset += len(tokens)
            if last:
                return
        if script.error is not None:
            play.task = None
            self._end(play, script.error)

    @staticmethod
    def _prompt_logprobs(request: GenerationRequest) -> PromptLogprobs | None:
        """Token t at position p has logprob -t/128 and rank p; the likeliest are 0, 1, ... with -0, -1/128, ..."""
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            return None
        token_ids = unpack_tokens(request.prompt_ids)[1:]
        return PromptLogprobs.pack(
            [-token / 128 for token in token_ids],
            range(1, len(token_ids) + 1),
            [range(wanted)] * len(token_ids),
            [[-n / 128 for n in range(wanted)]] * len(token_ids),
        )

    @staticmethod
    def _logprobs(tokens: list[int], wanted: int | None) -> tuple[TokenLogprobs, ...] | None:
        """Token t has logprob -t/100; its alternatives are t, t+1, ..."""
        if wanted is None:
            return None
        return tuple(
            TokenLogprobs(
                -token / 100,
                tuple(token + n for n in range(wanted)),
                tuple(-(token + n) / 100 for n in range(wanted)),
            )
            for token in tokens
        )
