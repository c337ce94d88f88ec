"""The life of one generating request on the HTTP side.

    slot (429, 503) -> body (413) -> read (400, 404) -> submit (503) -> stream or collect -> exactly one end

While it runs, three things may end it before its last token, each through its result: the client leaves (499), its time
is up (504), or the frontend stops (503). Each takes the work from the engine at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.result import GenerationResult
from twostroke.frontend.errors import CLIENT_LEFT, ClientLeftError
from twostroke.frontend.exchange import Exchange, State
from twostroke.frontend.in_flight import InFlight
from twostroke.frontend.intake import Submission
from twostroke.frontend.metrics import FrontendMetrics, RequestTimer
from twostroke.frontend.output import OutputText, Piece
from twostroke.frontend.surface import Surface
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import AbortedError, DeadlineError
from twostroke.protocol.openai import Usage
from twostroke.protocol.tokens import token_count

DONE = b"data: [DONE]\n\n"
STALLED_S = 5.0
"""How long after its deadline a request may still hang in a client that neither sends nor reads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request.

    Attributes:
        body_bytes: Length of its body.
        timeout_s: From its arrival to its end.
    """

    body_bytes: int
    timeout_s: float


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every failure becomes its answer."""
        exchange = Exchange(scope, receive, send)
        timer = RequestTimer(self._metrics, self._surface.name)
        status = CLIENT_LEFT  # what a request is that is cut off from outside
        try:
            async with asyncio.timeout(self._limits.timeout_s + STALLED_S):
                await self._serve(exchange, timer)
            status = CLIENT_LEFT if exchange.state is State.LEFT else 200
        except ClientLeftError:
            status = CLIENT_LEFT
        except TimeoutError:
            status = await exchange.give_up(DeadlineError("the request was not sent, or its answer not read, in time"))
        except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, the client gets one answer
            status = await exchange.fail(error)
        finally:
            timer.ended(status)

    async def _serve(self, exchange: Exchange, timer: RequestTimer) -> None:
        with self._in_flight.slot():
            body = await exchange.body(self._limits.body_bytes)
            submission = await self._surface.read(body, self._limits.timeout_s)
            with self._running(submission, exchange) as result:
                pieces = _Pieces(submission, result, self._executor, self._text, timer)
                if submission.stream:
                    await self._stream(exchange, submission, pieces)
                else:
                    await self._collect(exchange, submission, pieces)

    @contextlib.contextmanager
    def _running(self, submission: Submission, exchange: Exchange) -> Iterator[GenerationResult]:
        """Submit, and let the client's leaving, the deadline and the stop end the result."""
        result = self._executor.submit(submission.request)
        timeout_s = self._limits.timeout_s

        def leave() -> None:
            self._in_flight.end(result, AbortedError("the client left"))

        def expire() -> None:
            # The worker ends it at about the same time; this also covers a worker that hangs.
            self._in_flight.end(result, DeadlineError(f"the request did not end within {timeout_s:g} s"))

        with self._in_flight.tracked(result), exchange.watch(leave):
            deadline = asyncio.get_running_loop().call_later(timeout_s, expire)
            try:
                yield result
            finally:
                deadline.cancel()

    async def _stream(self, exchange: Exchange, submission: Submission, pieces: "_Pieces") -> None:
        """One event a piece; the last one, the counts and the end mark leave together."""
        writer = self._surface.writer(submission)
        head = writer.first()
        async for piece in pieces:
            data = head + writer.piece(piece)
            head = b""
            if piece.finish_reason is None:
                await exchange.event(data)
                continue
            counts = writer.usage(pieces.usage()) if submission.include_usage else b""
            await exchange.event(data + counts + DONE, last=True)

    async def _collect(self, exchange: Exchange, submission: Submission, pieces: "_Pieces") -> None:
        answer = Piece()
        async for piece in pieces:
            answer.append(piece)
        await exchange.json(self._surface.writer(submission).whole(answer, pieces.usage()))


class _Pieces:
    """Iterates over the pieces of one result; outputs that wait together become one piece."""

    def __init__(
        self,
        submission: Submission,
        result: GenerationResult,
        executor: GenerationExecutor,
        text: TextModel,
        timer: RequestTimer,
    ) -> None:
        self._submission = submission
        self._result = result
        self._executor = executor
        min_tokens = submission.request.sampling.min_tokens
        self._output = OutputText(text, submission.stop, min_tokens, keep_ids=submission.return_token_ids)
        self._timer = timer

    async def __aiter__(self) -> AsyncIterator[Piece]:
        result, output = self._result, self._output
        while (first := await result.next_output()) is not None:
            outputs = [first, *result.take_waiting()]
            self._timer.tokens(sum(token_count(one.token_ids) for one in outputs))
            piece = output.add(outputs)
            if output.stopped_by_string:
                # The engine does not know stop strings; nothing it still makes is of use.
                self._executor.abort_request(result.key.client_id, result.key.index)
            if piece.finish_reason is not None:
                self._timer.prompt(self._submission.prompt_tokens, output.cached_tokens)
            if not piece.empty:
                yield piece
            if piece.finish_reason is not None:
                return

    def usage(self) -> Usage:
        """The counts so far."""
        output = self._output
        return Usage.count(self._submission.prompt_tokens, output.token_count, output.cached_tokens)
