"""The engine thread: the only one that touches the engine, its block manager and the role part.

    SERVING --drain-----> DRAINING    new requests are refused, the others go on
    SERVING, DRAINING --shutdown--> STOPPING    likewise, until none is left or the deadline comes
    STOPPING --> STOPPED              what was left got its final event; `run` returns

One round: wait for something to do, take what came in, let the role part and the engine work, answer. The loop sleeps
in its inbox when nothing can be done, and wakes for messages, for transfers and for the next deadline.
"""

import enum
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from twostroke.engine.constraint_compiler import ConstraintCompiler
from twostroke.engine.engine import Engine
from twostroke.protocol.errors import AbortedError, OverloadedError, RequestError
from twostroke.protocol.ids import frontend_of
from twostroke.protocol.requests import Abort, Drain, GenerationRequest, Shutdown
from twostroke.protocol.responses import ResponseBatch, SequenceOutput
from twostroke.protocol.tokens import token_count
from twostroke.protocol.worker import WorkerLoad
from twostroke.worker.constraint_gate import ConstraintGate, Held
from twostroke.worker.inbox import FrontendGone, Inbox, InboxItem, PartCrashed, Received, Terminate, Wake
from twostroke.worker.pulse import Pulse
from twostroke.worker.role_part import RolePart

CLOSING_SHARE = 0.2
"""Share of a shutdown's deadline that is kept for closing, after the requests have ended."""


class LoopStage(enum.Enum):
    """How far the loop is in its life; see the module's docstring."""

    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


_TRANSITIONS = {
    LoopStage.SERVING: frozenset({LoopStage.DRAINING, LoopStage.STOPPING}),
    LoopStage.DRAINING: frozenset({LoopStage.STOPPING}),
    LoopStage.STOPPING: frozenset({LoopStage.STOPPED}),
    LoopStage.STOPPED: frozenset[LoopStage](),
}


class Responder(Protocol):
    """Where the loop's outputs go."""

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """Take all outputs of one step for one frontend."""


class PartCrashedError(RuntimeError):
    """Another thread of the worker crashed; the cause is attached."""


class EngineLoop:
    """Runs one engine until it is told to stop.

    Args:
        engine: The engine; nobody else touches it while the loop runs.
        role_part: The role's part of a request's life.
        epoch: The worker's epoch.
        inbox: Where messages arrive.
        responder: Where outputs go.
        pulse: What other threads may know.
        compiler: Compiles the constraints of requests; None for a worker that cannot.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        role_part: RolePart,
        epoch: int,
        inbox: Inbox,
        responder: Responder,
        pulse: Pulse,
        compiler: ConstraintCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._role_part = role_part
        self._epoch = epoch
        self._inbox = inbox
        self._responder = responder
        self._pulse = pulse
        self._clock = clock
        self._log = structlog.get_logger(__name__).bind(epoch=epoch)
        self._stage = LoopStage.SERVING
        self._stop_at = 0.0  # when STOPPING gives up what is left
        self._close_by = 0.0  # when everything must be closed
        self._refusals: list[SequenceOutput] = []
        self._gate = ConstraintGate(compiler, inbox.wake, clock)

    @property
    def stage(self) -> LoopStage:
        """How far the loop is in its life."""
        return self._stage

    @property
    def closing_s(self) -> float:
        """Seconds that are left for closing, once the loop has stopped."""
        return max(0.0, self._close_by - self._clock())

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            PartCrashedError: Another thread of this worker crashed.
            Exception: The engine or the role part broke; fatal to this worker.
        """
        self._pulse.beat(self._load())
        while self._stage is not LoopStage.STOPPED:
            self._go_round()

    def _go_round(self) -> None:
        self._take_inbound()
        for held in self._gate.take_ready():
            self._admit_held(held)
        self._role_part.before_step()
        outputs = self._refused() + self._engine.step() + self._role_part.after_step()
        self._pulse.beat(self._load())  # first, so that whoever has an answer finds the load that goes with it
        self._answer(outputs)
        self._stop_if_due()

    # --- inbound ---

    def _take_inbound(self) -> None:
        timeout_s = self._idle_s()
        if timeout_s != 0:
            self._pulse.rest()
        for item in self._inbox.drain(timeout_s):
            self._pulse.resume()
            self._take(item)
        self._pulse.resume()

    def _idle_s(self) -> float | None:
        """How long there is nothing to do: None until something arrives, 0 for no time."""
        if self._engine.has_work or self._refusals or self._gate.ready:
            return 0
        waits = [self._engine.seconds_to_deadline()]
        if self._stage is LoopStage.STOPPING:
            waits.append(max(0.0, self._stop_at - self._clock()) if self._unfinished else 0.0)
        return min((wait for wait in waits if wait is not None), default=None)

    def _take(self, item: InboxItem) -> None:
        match item:
            case Received(_, GenerationRequest() as request):
                self._accept(request)
            case Received(_, Abort(client_id, index)):
                self._abort(client_id, index)
            case Received(_, Drain()):
                self._drain()
            case Received(frontend_id, Shutdown(deadline_s)):
                # Whoever shuts its worker down has failed its own requests already.
                self._abort_all(frontend_id)
                self._shut_down(deadline_s)
            case Terminate(deadline_s):
                self._shut_down(deadline_s)
            case FrontendGone(frontend_id):
                self._abort_all(frontend_id)
            case PartCrashed(part, error):
                raise PartCrashedError(f"{part} crashed: {error!r}") from error
            case Wake():
                pass

    def _accept(self, request: GenerationRequest) -> None:
        try:
            if self._stage is not LoopStage.SERVING:
                raise OverloadedError("this worker is draining and takes no new request; another one can")
            self._role_part.check(request)
            if request.constraint is None:
                self._engine.add(request)
            else:
                self._gate.hold(request)
        except RequestError as error:
            self._refuse(request, error)

    def _admit_held(self, held: Held) -> None:
        """The grammar of a held request is there, or known to be wrong."""
        request, outcome = held.remaining(self._clock()), held.outcome()
        try:
            if isinstance(outcome, RequestError):
                raise outcome
            self._engine.add(request, outcome)
        except RequestError as error:
            self._refuse(request, error)
        else:
            for abort in held.aborts:
                self._engine.abort(abort.client_id, abort.index)

    def _abort(self, client_id: int, index: int | None) -> None:
        held = self._gate.abort(Abort(client_id, index))
        if not self._engine.abort(client_id, index) and not held:
            self._log.debug("nothing to abort", client_id=f"{client_id:016x}", index=index)

    def _abort_all(self, frontend_id: int) -> None:
        """Give up every request of one frontend, leases included."""
        for client_id in self._engine.client_ids() | self._gate.client_ids():
            if frontend_of(client_id) == frontend_id:
                self._gate.abort(Abort(client_id))
                self._engine.abort(client_id)

    # --- outbound ---

    @property
    def _unfinished(self) -> bool:
        return self._engine.unfinished or bool(len(self._gate))

    def _refuse(self, request: GenerationRequest, error: RequestError) -> None:
        """Every sequence of the request ends with `error`."""
        offset = token_count(request.generated_ids)
        self._refusals += [SequenceOutput(key, offset, error=error.to_info()) for key in request.keys]

    def _refused(self) -> list[SequenceOutput]:
        refusals, self._refusals = self._refusals, []
        return refusals

    def _answer(self, outputs: list[SequenceOutput]) -> None:
        """One message for each frontend that has outputs."""
        by_frontend: defaultdict[int, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_frontend[frontend_of(output.key.client_id)].append(output)
        for frontend_id, its_outputs in by_frontend.items():
            self._responder.respond(frontend_id, ResponseBatch(self._epoch, its_outputs))

    def _load(self) -> WorkerLoad:
        """The engine's load, with what only the loop and the role part know."""
        load, transfers = self._engine.load(), self._role_part.transfers
        counters = msgspec.structs.replace(
            load.counters,
            transfers_done=transfers.done,
            transfers_failed=transfers.failed,
            transfer_bytes=transfers.nbytes,
            handover=transfers.times,
        )
        admitting = load.admitting and self._stage is LoopStage.SERVING
        return msgspec.structs.replace(load, counters=counters, admitting=admitting)

    # --- stages ---

    def _move(self, to: LoopStage) -> None:
        if to not in _TRANSITIONS[self._stage]:
            raise RuntimeError(f"the engine loop cannot go from {self._stage.value} to {to.value}")
        self._log.info("engine loop", stage=to.value)
        self._stage = to

    def _drain(self) -> None:
        if self._stage is LoopStage.SERVING:
            self._move(LoopStage.DRAINING)

    def _shut_down(self, deadline_s: float) -> None:
        """Stop within `deadline_s`; a second call may only bring the end nearer."""
        if self._stage is LoopStage.STOPPING:
            deadline_s = min(deadline_s, self._close_by - self._clock())
        else:
            self._move(LoopStage.STOPPING)
        self._close_by = self._clock() + deadline_s
        self._stop_at = self._close_by - CLOSING_SHARE * deadline_s

    def _stop_if_due(self) -> None:
        if self._stage is not LoopStage.STOPPING:
            return
        if self._unfinished and self._clock() < self._stop_at:
            return
        for held in self._gate.take_all():
            self._refuse(held.request, AbortedError("this worker ends"))
        for client_id in self._engine.client_ids():
            self._engine.abort(client_id)
        # With nothing left to run, this step only gives the final events.
        self._answer(self._refused() + self._engine.step() + self._role_part.after_step())
        self._move(LoopStage.STOPPED)
