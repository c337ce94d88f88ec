"""One request from its first leg to its one final event.

    submit
      | workers chosen (or waited for)
      v
    context leg  --fails before the first token--> placed again elsewhere, as the next attempt, up to max_attempts
      | first token(s) + context_phase_params (HANDOVER)
      |   -> the client gets the tokens at once, before anything else happens
      |   (STOP or LENGTH instead: the request is done, and no generation worker hears of it)
      v
    generation leg, with generated_ids = first tokens     (a worker that refuses at once: the next one)
      | tokens -> client
      v
    final output -> done      error -> failed      abort -> cancelled      time is up -> failed
                              (a stop string, found by the frontend: done)

On an aggregated worker one `full` leg replaces both. The phases and their order are the ledger's; `_end` is the one way
out: it closes what is open, tells the workers, and gives the client its final event if it has not had one. A lease that
nobody will read any more is aborted at the context worker; once the first generated token is here, there is none.
All of it happens on one event loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from router.dispatch import Dispatcher, Placement
from router.ledger import Ledger, LedgerEntry, LedgerPhase
from router.legs import Leg
from router.metrics import RouterMetrics
from router.workers import AttachedWorker, Claim
from twostroke.executor.base import ResultSink
from twostroke.executor.result import OffsetCheck
from twostroke.protocol.errors import (
    AbortedError,
    DeadlineError,
    EngineDeadError,
    InternalRequestError,
    OverloadedError,
    TransferError,
    TwostrokeError,
)
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import token_count
from twostroke.protocol.transfer import ContextPhaseParams

_RETRIED = (EngineDeadError, OverloadedError, AbortedError)
"""What another worker may do better. An abort that nobody asked for: the worker had lost this router."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LifeContext:
    """What all requests of one router share.

    Attributes:
        ledger: Every move is made there.
        dispatcher: Chooses workers.
        metrics: Retries and hand-over times.
        loop: The event loop that everything runs on.
        max_attempts: How often a context phase is placed at most.
        request_timeout_s: Longest life of a request.
        on_end: Told once when a request has ended.
    """

    ledger: Ledger
    dispatcher: Dispatcher
    metrics: RouterMetrics
    loop: asyncio.AbstractEventLoop
    max_attempts: int
    request_timeout_s: float
    on_end: Callable[["RequestLife"], None]


class RequestLife:
    """One request; see the module.

    Args:
        context: What it shares with the others.
        request: As the client's frontend submitted it.
        client: Sink of the whole request.

    Raises:
        ValueError: The ledger holds the client id already.
    """

    def __init__(self, context: LifeContext, request: GenerationRequest, client: ResultSink) -> None:
        self.client = client
        self.request = request
        self.prompt_tokens = token_count(request.prompt_ids)
        self.refused_by: set[AttachedWorker] = set()
        self.entry: LedgerEntry = context.ledger.open(request.key.client_id, self.prompt_tokens)
        self._context = context
        self._offsets = OffsetCheck(token_count(request.generated_ids))
        self._first_offset = self._offsets.expected
        self._first_tokens = b""
        self._context_leg: Leg | None = None
        self._last_leg: Leg | None = None
        self._planned: Claim | None = None
        self._params: ContextPhaseParams | None = None
        self._generation_refused_by: set[AttachedWorker] = set()
        limit_s = context.request_timeout_s
        if request.deadline_s is not None:
            limit_s = min(limit_s, request.deadline_s)
        self._ends_at_s = context.loop.time() + limit_s
        self._timer = context.loop.call_at(self._ends_at_s, self._time_is_up, limit_s)

    def start(self) -> None:
        """Look for workers; the end may come before this returns."""
        try:
            self._context.dispatcher.dispatch(self)
        except OverloadedError as error:
            self._end(LedgerPhase.FAILED, error)

    def cancel(self) -> None:
        """The client gave the request up."""
        self._end(LedgerPhase.CANCELLED, AbortedError(f"request {self.request.key} was aborted"))

    def complete(self) -> None:
        """The client has all that it wanted before the workers were done: its frontend found a stop string."""
        self._end(LedgerPhase.DONE, AbortedError(f"request {self.request.key} is complete"))

    def give_up(self, error: TwostrokeError) -> None:
        """The router cannot go on with the request."""
        self._end(LedgerPhase.FAILED, error)

    def begin(self, placement: Placement) -> None:
        """Workers were found: submit the first leg."""
        entry = self.entry
        self._context.ledger.move(entry, LedgerPhase.CONTEXT)
        self._context.metrics.attempts.inc()
        entry.generation_worker = placement.generation.worker.address
        if placement.context is None:
            leg = self._new_leg(Phase.FULL, placement.generation)
        else:
            entry.context_worker = placement.context.worker.address
            self._planned = placement.generation
            leg = self._context_leg = self._new_leg(Phase.CONTEXT_ONLY, placement.context)
        self._submit(leg)

    def not_placed(self, error: OverloadedError) -> None:
        """No worker took the request while it waited."""
        self._end(LedgerPhase.FAILED, error)

    def leg_output(self, leg: Leg, output: SequenceOutput) -> None:
        """See `LegOwner`. Runs for every token: no tasks, no copies."""
        try:
            fresh = self._offsets.accept(output)
        except InternalRequestError as error:
            self._end(LedgerPhase.FAILED, error)
            return
        if not fresh:
            if output.final:
                self._broken(leg, f"its last message repeats token {output.offset}")
            return
        if leg.phase is Phase.CONTEXT_ONLY:
            self._context_output(leg, output)
            return
        if self.entry.phase is not LedgerPhase.GENERATION:
            output = self._generation_begins(leg, output)
        self._forward(leg, output)

    def leg_failed(self, leg: Leg, error: TwostrokeError) -> None:
        """See `LegOwner`."""
        untouched = self._offsets.expected == self._first_offset
        if leg.phase is not Phase.GENERATION_ONLY and untouched and isinstance(error, _RETRIED):
            self._retry(leg, error)
            return
        if self.entry.phase is LedgerPhase.HANDOFF and isinstance(error, OverloadedError):
            self._generation_refused_by.add(leg.claim.worker)
            self._hand_over()
            return
        if isinstance(error, AbortedError):
            error = EngineDeadError(f"worker {leg.claim.worker.address} gave request {leg.key} up: {error}")
        self._end(LedgerPhase.FAILED, error)

    def _new_leg(self, phase: Phase, claim: Claim) -> Leg:
        key = self.request.key
        leg = self._last_leg = Leg(self, phase, SequenceKey(key.client_id, key.index, self.entry.attempt), claim)
        return leg

    def _submit(self, leg: Leg) -> None:
        """Send the request to the leg's worker; what goes wrong fails the leg."""
        worker = leg.claim.worker
        request = msgspec.structs.replace(
            self.request,
            key=leg.key,
            generated_ids=self.request.generated_ids + self._first_tokens,
            phase=leg.phase,
            context_phase_params=self._params,
            deadline_s=max(self._ends_at_s - self._context.loop.time(), 0.0),
        )
        try:
            worker.link.submit_to(request, leg)
        except (EngineDeadError, OverloadedError) as error:
            # Nothing was sent, so any other worker will do, in any phase.
            leg.fail(OverloadedError(f"worker {worker.address} cannot take request {leg.key}: {error}"))
        except TwostrokeError as error:
            leg.fail(InternalRequestError(f"request {leg.key} could not be sent to {worker.address}: {error}"))
        except Exception as error:  # noqa: BLE001 - see below
            # Whatever broke must not leave this request without its end, nor harm the others.
            _log.exception("submission failed", key=str(leg.key), worker=worker.address)
            leg.fail(InternalRequestError(f"request {leg.key} could not be sent to {worker.address}: {error!r}"))

    def _retry(self, leg: Leg, error: TwostrokeError) -> None:
        """Place the context phase on another worker; end with `error` if there is none."""
        self._release_plan()
        if self.entry.attempt + 1 >= self._context.max_attempts:
            self._end(LedgerPhase.FAILED, error)
            return
        self.refused_by.add(leg.claim.worker)
        self.entry.attempt += 1
        self._context.ledger.move(self.entry, LedgerPhase.QUEUED)
        self._context.metrics.retries.inc()
        _log.info("request placed again", key=str(leg.key), worker=leg.claim.worker.address, reason=str(error))
        try:
            self._context.dispatcher.dispatch(self)
        except OverloadedError:
            self._end(LedgerPhase.FAILED, error)

    def _context_output(self, leg: Leg, output: SequenceOutput) -> None:
        self._first_tokens += output.token_ids
        self._note_cached(output)
        if output.finish_reason is not FinishReason.HANDOVER:
            self._forward(leg, output)
            return
        self._params = output.context_phase_params
        self.client.feed(msgspec.structs.replace(output, finish_reason=None, context_phase_params=None))
        if self.entry.ended:
            leg.abort_at_worker()  # the client left on its first token: the lease has no reader
            return
        self._context.ledger.move(self.entry, LedgerPhase.HANDOFF)
        if self._params is None or self._params.first_token_ids != self._first_tokens:
            self._broken(leg, "its hand-over does not carry the tokens that it sent")
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        """Submit the generation leg to the planned worker, or to the next that takes it."""
        refused_by = self._generation_refused_by
        if len(refused_by) >= self._context.max_attempts:
            refusal = f"{len(refused_by)} generation workers refused the request; try again later"
            self._end(LedgerPhase.FAILED, TransferError(refusal))
            return
        try:
            claim = self._context.dispatcher.claim_generation(self._planned, self.prompt_tokens, refused_by)
        except OverloadedError as error:
            self._end(LedgerPhase.FAILED, TransferError(str(error)))
            return
        self._planned = None
        self.entry.generation_worker = claim.worker.address
        self._submit(self._new_leg(Phase.GENERATION_ONLY, claim))

    def _generation_begins(self, leg: Leg, output: SequenceOutput) -> SequenceOutput:
        """The first output of a generation or aggregated worker is here; returns what the client gets of it."""
        if leg.phase is Phase.FULL:
            self._note_cached(output)
            self._context.ledger.move(self.entry, LedgerPhase.GENERATION)
            return output
        self._context.metrics.handover_seconds.observe(self._context.ledger.move(self.entry, LedgerPhase.GENERATION))
        # How much of the prompt was cached is what the context worker said, in the client's usage too.
        return output if output.cached_tokens is None else msgspec.structs.replace(output, cached_tokens=None)

    def _forward(self, leg: Leg, output: SequenceOutput) -> None:
        if output.finish_reason is FinishReason.HANDOVER:
            self._broken(leg, f"it handed a request over that it was to run in phase {leg.phase}")
            return
        self.client.feed(output)
        if output.finish_reason is not None:
            self._end(LedgerPhase.DONE)

    def _note_cached(self, output: SequenceOutput) -> None:
        if output.cached_tokens is not None:
            self.entry.cached_tokens = output.cached_tokens

    def _broken(self, leg: Leg, how: str) -> None:
        """The worker broke the protocol for this request."""
        message = f"worker {leg.claim.worker.address} answered request {leg.key} wrongly: {how}"
        _log.error("protocol broken", key=str(leg.key), worker=leg.claim.worker.address, how=how)
        self._end(LedgerPhase.FAILED, InternalRequestError(message))

    def _time_is_up(self, limit_s: float) -> None:
        phase = self.entry.phase
        self._end(
            LedgerPhase.FAILED, DeadlineError(f"the request did not end within {limit_s:g} s; it was in phase {phase}")
        )

    def _release_plan(self) -> None:
        if self._planned is not None:
            self._planned.release()
            self._planned = None

    def _end(self, phase: LedgerPhase, error: TwostrokeError | None = None) -> None:
        """The one way out; only the first call does anything."""
        if self.entry.ended:
            return
        lease_unread = self.entry.phase is LedgerPhase.HANDOFF and error is not None
        self.entry.output_tokens = self._offsets.expected - self._first_offset
        self.entry.error = None if error is None or phase is LedgerPhase.DONE else str(error)
        self._context.ledger.move(self.entry, phase)
        self._timer.cancel()
        self._context.dispatcher.forget(self)
        self._release_plan()
        for leg in (self._context_leg, self._last_leg):
            if leg is not None:
                leg.give_up()
        if lease_unread and self._context_leg is not None:
            self._context_leg.abort_at_worker()
        self._context.on_end(self)
        if error is not None:
            self.client.fail(error)
            self._wake_client()

    def _wake_client(self) -> None:
        loop = self.client.loop
        if loop is self._context.loop:
            self.client.wake()
        elif loop is not None:
            loop.call_soon_threadsafe(self.client.wake)
