"""The life of one generating request on the HTTP side.

    slot (429, 503) -> body (413) -> read (400, 404) -> submit (503) -> stream or collect -> exactly one end

A request for several choices (several prompts, or `n`) has a result for each. While they run, four things may end all
of them before their last tokens: the client leaves (499), the time is up (504), the frontend stops (503), or one of
them fails. Each takes the work from the engine at once.
"""

import asyncio
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.result import GenerationResult
from twostroke.frontend.choices import Batch, Choice, Pieces, usage_of
from twostroke.frontend.errors import CLIENT_LEFT, ClientLeftError
from twostroke.frontend.exchange import Exchange, State
from twostroke.frontend.in_flight import InFlight
from twostroke.frontend.intake import Submission
from twostroke.frontend.metrics import FrontendMetrics, RequestTimer
from twostroke.frontend.output import Piece
from twostroke.frontend.request_fields import StreamUsage
from twostroke.frontend.surface import AnswerWriter, Surface
from twostroke.frontend.tokenizer import TextModel
from twostroke.frontend.watch import TICK_S, Watch
from twostroke.protocol.errors import AbortedError, DeadlineError

DONE = b"data: [DONE]\n\n"
STALLED_S = 5.0
"""How long after its deadline a request may still hang in a client that neither sends nor reads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request.

    Attributes:
        body_bytes: Length of its body.
        timeout_s: From its arrival to its end.
        keep_alive_s: A stream is never silent for longer.
    """

    body_bytes: int
    timeout_s: float
    keep_alive_s: float


class _Request:
    """What may end a request from outside, and has to take its work from the engine then.

    Args:
        exchange: Its client.
        in_flight: Ends results.
        limits: Its time.

    Attributes:
        results: All that was submitted for it.
        stalled: The client was given up; its task is cancelled then.
    """

    def __init__(self, exchange: Exchange, in_flight: InFlight, limits: Limits) -> None:
        self.results: list[GenerationResult] = []
        self.stalled = False
        self._exchange = exchange
        self._in_flight = in_flight
        self._timeout_s = limits.timeout_s
        self._expires_s = asyncio.get_running_loop().time() + limits.timeout_s
        self._task = asyncio.current_task()

    def leave(self) -> None:
        """The client has left."""
        self._in_flight.end(self.results, AbortedError("the client left"))

    def tick(self, now_s: float) -> None:
        """See `Watched`."""
        if now_s >= self._expires_s:
            # The worker ends it at about the same time; this also covers a worker that hangs.
            self._in_flight.end(self.results, DeadlineError(f"the request did not end within {self._timeout_s:g} s"))
            if now_s >= self._expires_s + STALLED_S and self._task is not None and not self.stalled:
                self.stalled = True
                self._task.cancel()
        self._exchange.tick(now_s)


class GenerationEndpoint:
    """Serves one endpoint's requests; an ASGI application.

    Args:
        surface: The endpoint's schema.
        executor: Runs the requests.
        text: Decodes the outputs.
        in_flight: Bounds and ends them.
        metrics: Measures them.
        limits: Bounds each one.
    """

    def __init__(
        self,
        surface: Surface,
        executor: GenerationExecutor,
        text: TextModel,
        *,
        in_flight: InFlight,
        metrics: FrontendMetrics,
        limits: Limits,
    ) -> None:
        self._surface = surface
        self._executor = executor
        self._text = text
        self._in_flight = in_flight
        self._metrics = metrics
        self._limits = limits
        # Short limits are looked at more often, so that they are kept about as well as long ones.
        self._watch = Watch(min(TICK_S, limits.timeout_s / 4, limits.keep_alive_s / 4))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every failure becomes its answer."""
        exchange = Exchange(scope, receive, send)
        timer = RequestTimer(self._metrics, self._surface.name)
        request = _Request(exchange, self._in_flight, self._limits)
        status = CLIENT_LEFT  # what a request is that is cut off from outside
        self._watch.add(request)
        try:
            status = await self._answer(exchange, request, timer)
        except asyncio.CancelledError:
            if not request.stalled:
                raise
            status = await exchange.give_up(DeadlineError("the request was not sent, or its answer not read, in time"))
        finally:
            self._watch.remove(request)
            timer.ended(status)

    async def _answer(self, exchange: Exchange, request: _Request, timer: RequestTimer) -> int:
        """Serve, and answer whatever goes wrong; the status that it comes to."""
        try:
            await self._serve(exchange, request, timer)
        except ClientLeftError:
            return CLIENT_LEFT
        except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, the client gets one answer
            return await exchange.fail(error)
        return CLIENT_LEFT if exchange.state is State.LEFT else 200

    async def _serve(self, exchange: Exchange, request: _Request, timer: RequestTimer) -> None:
        with self._in_flight.slot() as slot:
            body = await exchange.body(self._limits.body_bytes)
            submission = await self._surface.read(body, self._limits.timeout_s)
            slot.widen(len(submission.outputs))
            try:
                self._submit(submission, request)
                exchange.watch(request.leave)
                choices = [
                    Choice(index, result, submission, executor=self._executor, text=self._text, timer=timer.sequence())
                    for index, result in enumerate(request.results)
                ]
                if submission.stream:
                    await self._stream(exchange, submission, choices)
                else:
                    await self._collect(exchange, submission, choices)
            finally:
                exchange.unwatch()
                self._in_flight.untrack(request.results)

    def _submit(self, submission: Submission, request: _Request) -> None:
        """Submit all of it; what was submitted is the request's even if the rest cannot be."""
        for one in submission.requests:
            results = self._executor.submit_all(one)
            self._in_flight.track(results)
            request.results += results

    async def _stream(self, exchange: Exchange, submission: Submission, choices: list[Choice]) -> None:
        """One write a batch of pieces; the last ones, the counts and the end mark leave together."""
        writer = self._surface.writer(submission)
        events = _Events(writer, submission.usage, choices)
        around = writer.around_text() if events.only_text else None
        short_way = None if around is None else choices[0].short_way(exchange, around)

        def take(batch: Batch, *, last: bool) -> bool:
            # The first and the last are the reader's: they start and complete the answer.
            if last or not exchange.writable:
                return False
            exchange.write_event(events.of(batch))
            return True

        exchange.keep_alive(self._limits.keep_alive_s)
        try:
            with Pieces(choices, take, short_way) as pieces:
                while pieces.unfinished:
                    batch = await pieces.next_batch()
                    data = events.of(batch) if pieces.unfinished else events.of(batch) + events.end()
                    if data:  # text that may be a tool call is held back
                        await exchange.event(data, last=not pieces.unfinished)
        finally:
            exchange.keep_alive(None)

    async def _collect(self, exchange: Exchange, submission: Submission, choices: list[Choice]) -> None:
        answers = [Piece() for _ in choices]

        def add(batch: Batch) -> None:
            for choice, piece in batch:
                answers[choice.index].append(piece)

        def take(batch: Batch, *, last: bool) -> bool:
            if not last:
                add(batch)
            return not last

        with Pieces(choices, take) as pieces:
            while pieces.unfinished:
                add(await pieces.next_batch())
        await exchange.json(self._surface.writer(submission).whole(answers, usage_of(choices)))


class _Events:
    """Makes pieces into the events of a stream.

    Args:
        writer: Knows the schema.
        usage: When counts are told.
        choices: Of the answer.
    """

    def __init__(self, writer: AnswerWriter, usage: StreamUsage, choices: list[Choice]) -> None:
        self._writer = writer
        self._usage = usage
        self._choices = choices
        self._begun: set[int] = set()

    @property
    def only_text(self) -> bool:
        """Whether the text of a single choice is all that is told between the first event and the last."""
        return len(self._choices) == 1 and self._choices[0].output.only_text and self._usage is not StreamUsage.ALWAYS

    def of(self, batch: Batch) -> bytes:
        """The events of some pieces; perhaps none."""
        data = b""
        for choice, piece in batch:
            index = choice.index
            if index not in self._begun:
                self._begun.add(index)
                data += self._writer.first(index)
            counts = usage_of(self._choices) if self._usage is StreamUsage.ALWAYS else None
            data += self._writer.piece(index, piece, counts)
        return data

    def end(self) -> bytes:
        """The counts, if they are told, and the end mark."""
        return DONE if self._usage is StreamUsage.NEVER else self._writer.usage(usage_of(self._choices)) + DONE
