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

On an aggregated worker one `full` submission replaces both. A request for several sequences has one context phase, and
from then on goes on as so many `Continuation`s, each with its own leg, hand-over and end; all go to the same generation
worker if it takes them, since they share the prompt's blocks there. The first that fails ends all of them.

The phases and their order are the ledger's, which has the phase of the one that is furthest; `_end` is the one way out:
it closes what is open, tells the workers, and gives each client its final event if it has not had one. A lease that
nobody will read any more is aborted at the context worker; once the first generated token is here, there is none.
All of it happens on one event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from router.continuation import Continuation
from router.dispatch import Dispatcher, Placement
from router.ledger import Ledger, LedgerEntry, LedgerPhase
from router.legs import Leg
from router.metrics import RouterMetrics
from router.workers import AttachedWorker, Claim
from twostroke.executor.base import ResultSink
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
from twostroke.protocol.tokens import TOKEN_BYTES, token_count

_RETRIED = (EngineDeadError, OverloadedError, AbortedError)
"""What another worker may do better. An abort that nobody asked for: the worker had lost this router."""

_GENERATION = LedgerPhase.GENERATION  # asked for with every token: looking up an enum's member is slow

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
        clients: The sink of each of its sequences.

    Attributes:
        ends_at_s: When its time is up, in seconds of the loop's clock; the executor then calls `time_is_up`.

    Raises:
        ValueError: The ledger holds the client id already.
    """

    def __init__(self, context: LifeContext, request: GenerationRequest, clients: Sequence[ResultSink]) -> None:
        self.sequences = [Continuation(*pair) for pair in zip(request.sequences(), clients, strict=True)]
        self.request = request
        self.prompt_tokens = token_count(request.prompt_ids)
        self.refused_by: set[AttachedWorker] = set()
        self.entry: LedgerEntry = context.ledger.open(request.key.client_id, self.prompt_tokens, request.n)
        self._context = context
        self._only = self.sequences[0] if request.n == 1 else None
        self._limit_s = context.request_timeout_s
        if request.deadline_s is not None and request.deadline_s < self._limit_s:
            self._limit_s = request.deadline_s
        self.ends_at_s = context.loop.time() + self._limit_s

    def start(self, placement: Placement | None) -> None:
        """Run on the workers that were found, or wait for some; the end may come before this returns."""
        if placement is not None:
            self.begin(placement)
            return
        try:
            self._context.dispatcher.dispatch(self)
        except OverloadedError as error:
            self._end(LedgerPhase.FAILED, error)

    def cancel(self, index: int | None = None) -> None:
        """The client gave the request up, or one sequence of it."""
        self._end(LedgerPhase.CANCELLED, AbortedError(f"request {self.request.key} was aborted"), index)

    def complete(self, index: int | None = None) -> None:
        """The client has all that it wanted before the workers were done: its frontend found a stop string."""
        self._end(LedgerPhase.DONE, AbortedError(f"request {self.request.key} is complete"), index)

    def give_up(self, error: TwostrokeError) -> None:
        """The router cannot go on with the request."""
        self._end(LedgerPhase.FAILED, error)

    def time_is_up(self) -> None:
        """It has lived for as long as it may."""
        how = f"the request did not end within {self._limit_s:g} s; it was in phase {self.entry.phase}"
        self._end(LedgerPhase.FAILED, DeadlineError(how))

    def begin(self, placement: Placement) -> None:
        """Workers were found: submit the context phase, or all of it."""
        entry = self.entry
        self._context.ledger.move(entry, LedgerPhase.CONTEXT)
        self._context.metrics.attempts += 1
        entry.generation_worker = placement.generation.worker.address
        if placement.context is None:
            self._submit_first(Phase.FULL, placement.generation)
            return
        entry.context_worker = placement.context.worker.address
        for sequence, claim in zip(self.sequences, self._claims(placement.generation), strict=True):
            sequence.planned = claim
            if sequence.ended:
                sequence.release_plan()
        self._submit_first(Phase.CONTEXT_ONLY, placement.context)

    def not_placed(self, error: OverloadedError) -> None:
        """No worker took the request while it waited."""
        self._end(LedgerPhase.FAILED, error)

    def leg_output(self, leg: Leg, output: SequenceOutput) -> None:
        """See `LegOwner`. Runs for every token: no tasks, no copies."""
        sequence = self._only or self.sequences[leg.key.index]
        offsets = sequence.offsets
        if (
            output.offset == offsets.expected and output.finish_reason is None and sequence.phase is _GENERATION
        ):  # nearly all of them: what follows would come to the same
            offsets.expected += len(output.token_ids) // TOKEN_BYTES
            sequence.client.feed(output)
            return
        try:
            fresh = offsets.accept(output)
        except InternalRequestError as error:
            self._end(LedgerPhase.FAILED, error)
            return
        if not fresh:
            if output.final:
                self._broken(leg, f"its last message repeats token {output.offset}")
            return
        if leg.phase is Phase.CONTEXT_ONLY:
            self._context_output(sequence, leg, output)
            return
        if sequence.phase is not LedgerPhase.GENERATION:
            output = self._generation_begins(sequence, leg, output)
        self._forward(sequence, leg, output)

    def leg_failed(self, leg: Leg, error: TwostrokeError) -> None:
        """See `LegOwner`."""
        untouched = not any(one.output_tokens for one in self.sequences)
        if leg.phase is not Phase.GENERATION_ONLY and untouched and isinstance(error, _RETRIED):
            self._retry(leg, error)
            return
        sequence = self._only or self.sequences[leg.key.index]
        if sequence.phase is LedgerPhase.HANDOFF and isinstance(error, OverloadedError):
            sequence.refused_by.add(leg.claim.worker)
            self._hand_over(sequence)
            return
        if isinstance(error, AbortedError):
            error = EngineDeadError(f"worker {leg.claim.worker.address} gave request {leg.key} up: {error}")
        self._end(LedgerPhase.FAILED, error)

    def _claims(self, claim: Claim) -> list[Claim]:
        """`claim` for the first sequence, and for the others more on the same worker; the prompt counts once."""
        return [claim, *(claim.worker.claim(0) for _ in self.sequences[1:])]

    def _new_leg(self, sequence: Continuation, phase: Phase, claim: Claim) -> Leg:
        key = self.request.key
        return Leg(self, sequence.client, phase, SequenceKey(key.client_id, sequence.index, self.entry.attempt), claim)

    def _submit_first(self, phase: Phase, claim: Claim) -> None:
        """Submit all sequences together, to the worker that begins them."""
        legs = []
        for sequence, its_claim in zip(self.sequences, self._claims(claim), strict=True):
            sequence.context_leg = self._new_leg(sequence, phase, its_claim)
            legs.append(sequence.context_leg)
        request = msgspec.structs.replace(self.request, key=legs[0].key, phase=phase, deadline_s=self._time_left_s())
        self._submit(request, legs)
        for sequence, leg in zip(self.sequences, legs, strict=True):
            if sequence.ended:
                leg.give_up()  # given up before; the others are tried again, and the worker counts them all

    def _submit(self, request: GenerationRequest, legs: list[Leg]) -> None:
        """Send `request` to the legs' worker; what goes wrong fails them together."""
        worker, name = legs[0].claim.worker, legs[0].key
        try:
            worker.link.submit_to(request, *legs)
        except (EngineDeadError, OverloadedError) as error:
            # Nothing was sent, so any other worker will do, in any phase.
            _fail(legs, OverloadedError(f"worker {worker.address} cannot take request {name}: {error}"))
        except TwostrokeError as error:
            _fail(legs, InternalRequestError(f"request {name} could not be sent to {worker.address}: {error}"))
        except Exception as error:  # noqa: BLE001 - see below
            # Whatever broke must not leave this request without its end, nor harm the others.
            _log.exception("submission failed", key=str(name), worker=worker.address)
            _fail(legs, InternalRequestError(f"request {name} could not be sent to {worker.address}: {error!r}"))

    def _retry(self, leg: Leg, error: TwostrokeError) -> None:
        """Place the context phase on another worker; end with `error` if there is none."""
        legs = [one.context_leg for one in self.sequences if one.context_leg is not None]
        _abort([one for one in legs if one.drop()], whole_request=True)  # the other sequences, if any
        for sequence in self.sequences:
            sequence.release_plan()
        if self.entry.attempt + 1 >= self._context.max_attempts:
            self._end(LedgerPhase.FAILED, error)
            return
        self.refused_by.add(leg.claim.worker)
        self.entry.attempt += 1
        self._context.ledger.move(self.entry, LedgerPhase.QUEUED)
        self._context.metrics.retries += 1
        _log.info("request placed again", key=str(leg.key), worker=leg.claim.worker.address, reason=str(error))
        try:
            self._context.dispatcher.dispatch(self)
        except OverloadedError:
            self._end(LedgerPhase.FAILED, error)

    def _context_output(self, sequence: Continuation, leg: Leg, output: SequenceOutput) -> None:
        sequence.first_tokens += output.token_ids
        self._note_cached(output)
        if output.finish_reason is not FinishReason.HANDOVER:
            self._forward(sequence, leg, output)
            return
        sequence.params = output.context_phase_params
        sequence.client.feed(msgspec.structs.replace(output, finish_reason=None, context_phase_params=None))
        if sequence.ended:
            leg.abort_at_worker()  # the client left on its first token: the lease has no reader
            return
        self._enter(sequence, LedgerPhase.HANDOFF)
        if sequence.params is None or sequence.params.first_token_ids != sequence.first_tokens:
            self._broken(leg, "its hand-over does not carry the tokens that it sent")
        else:
            self._hand_over(sequence)

    def _hand_over(self, sequence: Continuation) -> None:
        """Submit the generation leg to the planned worker, or to the next that takes it."""
        refused_by = sequence.refused_by
        if len(refused_by) >= self._context.max_attempts:
            refusal = f"{len(refused_by)} generation workers refused the request; try again later"
            self._end(LedgerPhase.FAILED, TransferError(refusal))
            return
        try:
            claim = self._context.dispatcher.claim_generation(sequence.planned, self.prompt_tokens, refused_by)
        except OverloadedError as error:
            self._end(LedgerPhase.FAILED, TransferError(str(error)))
            return
        sequence.planned = None
        self.entry.generation_worker = claim.worker.address
        leg = sequence.generation_leg = self._new_leg(sequence, Phase.GENERATION_ONLY, claim)
        request = msgspec.structs.replace(
            sequence.request,
            key=leg.key,
            generated_ids=self.request.generated_ids + sequence.first_tokens,
            phase=leg.phase,
            context_phase_params=sequence.params,
            deadline_s=self._time_left_s(),
        )
        self._submit(request, [leg])

    def _time_left_s(self) -> float:
        return max(self.ends_at_s - self._context.loop.time(), 0.0)

    def _enter(self, sequence: Continuation, phase: LedgerPhase) -> None:
        """A sequence has gone on; the entry's phase is that of the one that is furthest."""
        sequence.phase = phase
        was = self.entry.phase
        if was is not phase and (was is LedgerPhase.CONTEXT or phase is LedgerPhase.GENERATION):
            spent_s = self._context.ledger.move(self.entry, phase)
            if was is LedgerPhase.HANDOFF:
                self._context.metrics.handover.observe(spent_s)

    def _generation_begins(self, sequence: Continuation, leg: Leg, output: SequenceOutput) -> SequenceOutput:
        """The first output of a generation or aggregated worker is here; returns what the client gets of it."""
        self._enter(sequence, LedgerPhase.GENERATION)
        if leg.phase is Phase.FULL:
            self._note_cached(output)
            return output
        # How much of the prompt was cached is what the context worker said, in the client's usage too.
        return output if output.cached_tokens is None else msgspec.structs.replace(output, cached_tokens=None)

    def _forward(self, sequence: Continuation, leg: Leg, output: SequenceOutput) -> None:
        if output.finish_reason is FinishReason.HANDOVER:
            self._broken(leg, f"it handed a request over that it was to run in phase {leg.phase}")
            return
        sequence.client.feed(output)
        if output.finish_reason is not None:
            self._end(LedgerPhase.DONE, index=sequence.index)

    def _note_cached(self, output: SequenceOutput) -> None:
        if output.cached_tokens is not None:
            self.entry.cached_tokens = output.cached_tokens

    def _broken(self, leg: Leg, how: str) -> None:
        """The worker broke the protocol for this request."""
        message = f"worker {leg.claim.worker.address} answered request {leg.key} wrongly: {how}"
        _log.error("protocol broken", key=str(leg.key), worker=leg.claim.worker.address, how=how)
        self._end(LedgerPhase.FAILED, InternalRequestError(message))

    def _end(self, phase: LedgerPhase, error: TwostrokeError | None = None, index: int | None = None) -> None:
        """The one way out, of all sequences or of one; for each only the first call does anything."""
        ending = [one for one in self.sequences if not one.ended and index in (None, one.index)]
        if not ending:
            return
        untold = [leg for one in ending for leg in one.end(phase, read=error is None)]
        whole = all(one.ended for one in self.sequences)
        if whole:
            self._close(phase, error)
        _abort(untold, whole_request=whole and len(ending) > 1)
        if whole:
            self._context.on_end(self)
        if error is not None:
            for one in ending:
                one.client.fail(error)
                self._wake(one.client)

    def _close(self, last: LedgerPhase, error: TwostrokeError | None) -> None:
        """All sequences have ended: so does the ledger entry, as the worst of them did."""
        ends = {one.phase for one in self.sequences}
        phase = next((one for one in (LedgerPhase.FAILED, LedgerPhase.CANCELLED) if one in ends), last)
        self.entry.output_tokens = sum(one.output_tokens for one in self.sequences)
        self.entry.error = None if error is None or phase is LedgerPhase.DONE else str(error)
        self._context.ledger.move(self.entry, phase)
        self._context.dispatcher.forget(self)
        for one in self.sequences:  # legs know this object: a cycle, which would stay until the garbage is collected
            one.context_leg = one.generation_leg = None

    def _wake(self, client: ResultSink) -> None:
        loop = client.loop
        if loop is self._context.loop:
            client.wake()
        elif loop is not None:
            loop.call_soon_threadsafe(client.wake)


def _fail(legs: list[Leg], error: TwostrokeError) -> None:
    """Nothing of a submission was sent: the first leg tells of it for all."""
    first, *others = legs
    for leg in others:
        leg.drop()
    first.fail(error)


def _abort(legs: list[Leg], *, whole_request: bool) -> None:
    """Tell the legs' workers; where a whole request ends, each of them once."""
    if whole_request:
        legs = list({leg.claim.worker: leg for leg in legs}.values())
    for leg in legs:
        leg.abort_at_worker(whole_request=whole_request)
