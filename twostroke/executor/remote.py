"""`RemoteExecutor`: one attachment to one epoch of a worker that runs elsewhere.

    connecting --Attach waits for the connection--> attaching --Attached--> attached
    any --AttachRefused | connection lost | silence | WorkerStopping--> dead    (everything pending fails; `on_dead`)
    any --shutdown--> dead    (aborts its requests and leaves; the worker goes on)

It lives on one event loop and is used on that loop's thread only. Attaching again, to the next epoch or after a lost
connection, takes a new object.
"""

import asyncio
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import structlog
import zmq

from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.executor.pending import PendingResults
from twostroke.executor.turn_outbox import TurnOutbox
from twostroke.ipc.attach_client import LEAVING_LINGER_MS, AttachClient
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.pauses import OwnPauses
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.errors import EngineDeadError, OverloadedError
from twostroke.protocol.ids import ClientIds, frontend_of
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Detach,
    FrontendBeat,
    GenerationRequest,
)
from twostroke.protocol.responses import FrontendBound, ResponseBatch, SequenceOutput
from twostroke.protocol.worker import Attached, AttachRefused, Heartbeat, WorkerDescription, WorkerLoad, WorkerStopping

_BURST = 256  # messages handled before other callbacks of the loop get their turn
_TICK_S = 0.25

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Deadlines and bounds of one attachment.

    Attributes:
        attach_s: How long connecting and attaching may take.
        dead_after_s: A worker silent for so long is dead.
        beat_s: Seconds between beats to the worker.
        limits: Bounds of the socket's queues.
    """

    attach_s: float = 5.0
    dead_after_s: float = 5.0
    beat_s: float = 1.0
    limits: QueueLimits = field(default_factory=QueueLimits)


class _State(enum.Enum):
    CONNECTING = enum.auto()
    ATTACHING = enum.auto()
    ATTACHED = enum.auto()
    DEAD = enum.auto()


_MOVES = {
    _State.CONNECTING: {_State.ATTACHING, _State.DEAD},
    _State.ATTACHING: {_State.ATTACHED, _State.DEAD},
    _State.ATTACHED: {_State.DEAD},
    _State.DEAD: set[_State](),
}


_READY, _STARTING = Health(HealthState.READY), Health(HealthState.STARTING)  # asked for with every request


class RemoteExecutor(GenerationExecutor):
    """An attached worker epoch; make one with `attach`.

    Attributes:
        drops: Counts of messages dropped.
        load: From the worker's last heartbeat.
        step_age_s: Likewise: seconds since its engine loop last went round.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        client_ids: ClientIds,
        on_dead: Callable[[EngineDeadError], None] | None,
        options: RemoteOptions,
    ) -> None:
        self._address = address
        self._client_ids = client_ids
        self._on_dead = on_dead
        self._options = options
        self.drops = DropCounters()
        self.load = WorkerLoad()
        self.step_age_s = 0.0
        self._pending = PendingResults()
        self._attached: Attached | None = None
        self._state = _State.CONNECTING
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._attaching: asyncio.Future[Attached] = self._loop.create_future()
        self._client = AttachClient(zmq.Context.instance(), address, secret, options.limits, self.drops)
        self._outbox = TurnOutbox(self._loop, self._client.send_bundle, self._flush_turn)
        self._descriptors = self._client.descriptors()
        for descriptor, turn in zip(self._descriptors, (self._turn, self._connection_turn), strict=True):
            self._loop.add_reader(descriptor, turn)
        self._heard_at = self._beat_at = self._loop.time()
        self._pauses = OwnPauses(options.dead_after_s)
        self._tick_timer = self._loop.call_soon(self._tick)
        self._turn_scheduled = False

    @classmethod
    async def attach(
        cls,
        address: str,
        secret: bytes,
        client_ids: ClientIds,
        *,
        on_dead: Callable[[EngineDeadError], None] | None = None,
        options: RemoteOptions = RemoteOptions(),
    ) -> Self:
        """Attach to the worker at `address` (`tcp://host:port`).

        Args:
            address: The worker's port.
            secret: The cluster secret.
            client_ids: The frontend's; one object serves all its workers.
            on_dead: Called once, on the loop, when the attachment dies by itself after it was made.
            options: Deadlines and bounds.

        Raises:
            EngineDeadError: There is no such worker, it refused (the message says why), or it did not answer in time.
        """
        executor = cls(address, secret, client_ids, on_dead, options)
        try:
            async with asyncio.timeout(options.attach_s):
                await executor._attaching
        except TimeoutError:
            error = EngineDeadError(f"worker {address} did not answer within {options.attach_s} s; is it running?")
            executor._die(error)
            raise error from None
        except BaseException:
            executor._die(EngineDeadError(f"attaching to worker {address} was given up"))
            raise
        return executor

    @property
    def epoch(self) -> int:
        """The worker's epoch."""
        return self._require_attached().epoch

    @property
    def description(self) -> WorkerDescription:
        """What the worker is and can do."""
        return self._require_attached().description

    @property
    def model(self) -> ServedModel:
        """The served model."""
        return ServedModel.of(self.description)

    @property
    def silence_s(self) -> float:
        """Seconds since the worker was last heard."""
        return self._loop.time() - self._heard_at

    @property
    def pending(self) -> int:
        """How many sequences are pending here."""
        return len(self._pending)

    def draw_client_id(self) -> int:
        """A client id for a new request of this frontend."""
        return self._client_ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """See `GenerationExecutor`; on the loop's thread.

        Raises:
            ProtocolError: The request is too large to send.
        """
        self._require_thread()
        if frontend_of(request.key.client_id) != self._client_ids.frontend_id:
            raise ValueError(f"client id of sequence {request.key} was not drawn by this frontend")
        self._pending.submit(dict(zip(request.keys, sinks, strict=True)), lambda: self._send_request(request))

    def _send_request(self, request: GenerationRequest) -> None:
        if self._outbox.stuck and not self._outbox.flush():
            raise OverloadedError(f"the queue to worker {self._address} is full; try again later")
        if len(self._outbox) >= self._options.limits.messages:
            raise OverloadedError(f"{len(self._outbox)} messages wait for worker {self._address}; try again later")
        self._outbox.post(self._client.encode(self.epoch, request))

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """See `GenerationExecutor`; on the loop's thread."""
        self._require_thread()
        self._pending.abort(client_id, index)
        if self._state is not _State.ATTACHED:
            return
        self._outbox.post(self._client.encode(self.epoch, Abort(client_id, index)))
        if len(self._outbox) > self._options.limits.control and not self._outbox.flush():
            self._die(EngineDeadError(f"worker {self._address} takes no messages any more"))

    def _flush_turn(self) -> None:
        if self._state is _State.DEAD:
            return
        try:
            self._outbox.flush()
            self._turn_if_readable()
        except Exception as error:  # noqa: BLE001 - a broken executor ends as a dead one, loudly
            self._broke(error)

    def check_health(self) -> Health:
        """How the attachment fares."""
        if self._pending.error is not None:
            return Health(HealthState.DEAD, str(self._pending.error))
        return _READY if self._state is _State.ATTACHED else _STARTING

    def shutdown(self, deadline_s: float | None = None) -> None:  # noqa: ARG002 - leaving never waits
        """Abort what is pending and leave; the worker goes on. `on_dead` is not called."""
        self._require_thread()
        self._on_dead = None
        if self._state is _State.ATTACHED and self._outbox.flush():
            for client_id in self._pending.client_ids():
                self._client.send(self.epoch, Abort(client_id))
            self._client.send(self.epoch, Detach(self._client_ids.frontend_id))
        self._die(EngineDeadError(f"this frontend left worker {self._address}"), LEAVING_LINGER_MS)

    def _require_attached(self) -> Attached:
        if self._attached is None:
            raise EngineDeadError(f"worker {self._address} was never attached")
        return self._attached

    def _require_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a RemoteExecutor is used on the thread of its event loop only")

    def _move(self, state: _State) -> None:
        if state not in _MOVES[self._state]:
            raise AssertionError(f"a remote executor cannot go from {self._state.name} to {state.name}")
        self._state = state

    def _turn_if_readable(self) -> None:
        """Sending may swallow the descriptor's edge, so what came in the meantime is read from here."""
        if self._state is not _State.DEAD and not self._turn_scheduled and self._client.readable:
            self._turn_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read what has arrived."""
        self._turn_scheduled = False
        if self._state is _State.DEAD:
            return
        try:
            if self._state is _State.CONNECTING:
                self._try_attach()
            elif not self._read():
                self._turn_if_readable()
            if self._outbox.stuck:  # the queue was full; there may be room now
                self._outbox.flush()
        except Exception as error:  # noqa: BLE001 - a broken executor ends as a dead one, loudly
            self._broke(error)

    def _connection_turn(self) -> None:
        """See whether the connection still stands; what arrived before it was lost is read first."""
        if self._state is _State.DEAD:
            return
        failure = self._client.failure()
        if failure is None:
            self._turn()
            return
        try:
            while not self._read():
                pass
        except Exception as error:  # noqa: BLE001 - as in `_turn`
            self._broke(error)
        self._die(EngineDeadError(f"worker {self._address}: {failure}"))

    def _try_attach(self) -> None:
        if self._client.send(0, Attach(PROTOCOL_VERSION, self._client_ids.frontend_id)):
            self._move(_State.ATTACHING)
            self._turn_if_readable()

    def _read(self) -> bool:
        """Handle at most one burst of messages; True if nothing was left waiting (or this executor died)."""
        messages, emptied = self._client.receive(_BURST)
        if messages:
            self._heard_at = self._loop.time()
        outputs: list[SequenceOutput] = []
        for message in messages:
            if isinstance(message, ResponseBatch) and self._current(message.epoch):
                outputs += message.outputs
        if outputs:
            unknown = self._pending.deliver(outputs)
            self.drops.count(DropReason.UNKNOWN_KEY, unknown)
        for message in messages:
            if not isinstance(message, ResponseBatch):
                self._handle(message)
        return emptied or self._state is _State.DEAD

    def _current(self, epoch: int) -> bool:
        if self._attached is not None and epoch == self._attached.epoch:
            return True
        self.drops.count(DropReason.WRONG_EPOCH)
        return False

    def _handle(self, message: FrontendBound) -> None:
        """Handle whatever is not a batch of outputs."""
        if self._state is _State.ATTACHING and isinstance(message, Attached):
            self._take_on(message)
        elif isinstance(message, AttachRefused) and self._state is not _State.DEAD:
            self._die(EngineDeadError(f"worker {self._address} refused this frontend: {message.message}"))
        elif self._state is not _State.ATTACHED or not self._current(message.epoch):
            return
        elif isinstance(message, Heartbeat):
            self.load, self.step_age_s = message.load, message.step_age_s
        elif isinstance(message, WorkerStopping):
            self._die(EngineDeadError(f"worker {self._address} stops: {message.reason}"))

    def _take_on(self, message: Attached) -> None:
        if message.version != PROTOCOL_VERSION:
            text = f"worker {self._address} speaks version {message.version}, this frontend version {PROTOCOL_VERSION}"
            self._die(EngineDeadError(text))
            return
        self._attached = message
        self._move(_State.ATTACHED)
        if not self._attaching.done():
            self._attaching.set_result(message)

    def _tick(self) -> None:
        """Read (the safety net for lost edges of the descriptor), beat, and see whether the worker still does."""
        self._connection_turn()
        try:
            self._beat()
        except Exception as error:  # noqa: BLE001 - a broken executor ends as a dead one, loudly
            self._broke(error)
        if self._state is not _State.DEAD:
            self._tick_timer = self._loop.call_later(_TICK_S, self._tick)

    def _beat(self) -> None:
        now = self._loop.time()
        self._heard_at = min(now, self._heard_at + self._pauses.look(now))
        if self._state is not _State.ATTACHED:
            return
        if self.silence_s > self._options.dead_after_s:
            self._die(EngineDeadError(f"worker {self._address} was silent for {self.silence_s:.1f} s"))
            return
        if self._outbox.flush() and now - self._beat_at >= self._options.beat_s:
            self._beat_at = now
            self._client.send(self.epoch, FrontendBeat(self._client_ids.frontend_id))
        self._turn_if_readable()

    def _broke(self, error: Exception) -> None:
        self._die(EngineDeadError(f"the executor of worker {self._address} broke: {error!r}"))
        log.error("a remote executor broke", address=self._address, exc_info=error)

    def _die(self, error: EngineDeadError, linger_ms: int = 0) -> None:
        """End once: record, close, fail everything pending, tell."""
        if self._state is _State.DEAD:
            return
        was_attached = self._state is _State.ATTACHED
        self._move(_State.DEAD)
        self._tick_timer.cancel()
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._outbox.clear()
        self._client.close(linger_ms)
        self._pending.fail_all(error)
        if not self._attaching.done():
            self._attaching.set_exception(error)
        if was_attached and self._on_dead is not None:
            log.warning("worker lost", address=self._address, reason=str(error))
            self._on_dead(error)
