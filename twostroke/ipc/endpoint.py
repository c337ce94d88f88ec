"""`WorkerEndpoint`: all sockets that a worker has towards frontends, owned by its I/O thread.

    construct            sockets are bound; the launcher connects
    report(identity)     before weights are loaded; then progress, and at last ready or failed
    describe(...)        attached frontends are admitted from now on
    poll / send / broadcast in turn, from one thread; `wake` from any
    close                results that were queued may be taken for a moment, then they are given up

A poll returns what the worker has to act on and nothing else: authentication, epochs, attaching, beats and drop counts
are dealt with here.
"""

import enum
import time
from dataclasses import dataclass, field

import structlog
import zmq

from twostroke.ipc.attach_port import AttachPort, Event, FrontendLost, Inbound
from twostroke.ipc.codec import result_codec
from twostroke.ipc.curve import CurveGuard
from twostroke.ipc.drops import DropCounters
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.local_port import InitStatusPort, LocalPort
from twostroke.ipc.pauses import OwnPauses
from twostroke.ipc.sockets import QueueLimits, Wake
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import LAUNCHING_FRONTEND
from twostroke.protocol.responses import FrontendBound, ResponseBatch
from twostroke.protocol.worker import InitStatus, WorkerDescription, WorkerReady, WorkerStopping

__all__ = ["EndpointOptions", "Event", "FrontendLost", "Inbound", "WorkerEndpoint"]

log = structlog.get_logger(__name__)


class _LocalQueue(enum.Enum):
    """Whether the launching frontend gets its results: `INTACT -> LOSSY -> TOLD`, never back."""

    INTACT = enum.auto()
    LOSSY = enum.auto()
    TOLD = enum.auto()


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Bounds and deadlines of a worker's endpoint.

    Attributes:
        limits: Of every socket's queues.
        burst: Messages read from one socket in one poll at most, so that no frontend starves another.
        silent_after_s: An attached frontend that was not heard for so long is lost.
        ack_s: How long the launcher may take to acknowledge an init status.
    """

    limits: QueueLimits = field(default_factory=QueueLimits)
    burst: int = 256
    silent_after_s: float = 5.0
    ack_s: float = 10.0


class WorkerEndpoint:
    """The sockets of one worker; see the module. Every method but `wake` belongs to one thread.

    Args:
        spec: From the launcher. Without a secret there is no TCP port.
        options: Bounds and deadlines.

    Raises:
        ConfigError: The TCP address cannot be bound.
    """

    def __init__(self, spec: LaunchSpec, options: EndpointOptions = EndpointOptions()) -> None:
        self._spec = spec
        self._options = options
        self.drops = DropCounters()
        self._codec = result_codec()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = Wake()
        self._guard: CurveGuard | None = None
        self._attach_port: AttachPort | None = None
        if spec.secret is not None:
            self._guard = CurveGuard(self._context, spec.secret)
            try:
                self._attach_port = self._open_attach_port(spec.secret)
            except BaseException:
                self._end_context()
                raise
        self._local = LocalPort(self._context, spec, options.limits, self.drops)
        self._init = InitStatusPort(self._context, spec, options.limits)
        self._poller = zmq.Poller()
        for readable in (self._wake.descriptor, self._local.requests):
            self._poller.register(readable, zmq.POLLIN)
        if self._attach_port is not None:
            self._poller.register(self._attach_port.socket, zmq.POLLIN)
        self._pauses = OwnPauses(options.silent_after_s)
        self._local_queue = _LocalQueue.INTACT
        self._lost: list[Event] = []

    def _open_attach_port(self, secret: bytes) -> AttachPort:
        return AttachPort(
            self._context,
            secret=secret,
            bind=self._spec.engine.worker_bind,
            advertise=self._spec.engine.advertise,
            epoch=self._spec.epoch,
            limits=self._options.limits,
            silent_after_s=self._options.silent_after_s,
            drops=self.drops,
        )

    @property
    def address(self) -> str:
        """Where frontends attach (`tcp://host:port`), or "" if this worker takes none."""
        return "" if self._attach_port is None else self._attach_port.address

    def report(self, status: InitStatus) -> None:
        """Tell the launcher how the start goes, and wait for its acknowledgement.

        Who is told that this worker is ready may send a request at once, whose answer must find the result queue
        connected: a queue without a reader takes nothing.

        Raises:
            ProtocolError: It did not acknowledge in time, or does not read the results.
        """
        if isinstance(status, WorkerReady) and not self._local.await_reader(self._options.ack_s):
            raise ProtocolError(f"the launcher did not connect to the result queue within {self._options.ack_s} s")
        self._init.report(status, self._options.ack_s)

    def describe(self, description: WorkerDescription) -> None:
        """Admit frontends over TCP from now on, and tell them `description`."""
        if self._attach_port is not None:
            self._attach_port.describe(description)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for messages, a wake or the timeout, and return what has arrived, in order for each frontend."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake.descriptor in ready:
            self._wake.clear()
        events: list[Event] = []
        if self._local.requests in ready:
            events += [Inbound(LAUNCHING_FRONTEND, body) for body in self._local.receive(self._options.burst)]
        self._tell_local()
        now = time.monotonic()
        if self._attach_port is not None:
            emptied = self._attach_port.socket not in ready
            if not emptied:
                remote, emptied = self._attach_port.receive(self._options.burst, now)
                events += remote
            self._attach_port.excuse(self._pauses.look(now), now)  # beats may still be under way
            if emptied:  # else beats may lie unread: nobody is silent yet
                self._attach_port.lose_silent(now)
            events += self._attach_port.take_lost()
        lost, self._lost = self._lost, []
        return events + lost

    def send(self, frontend_id: int, message: FrontendBound) -> bool:
        """Queue `message`; False if that frontend is not there or cannot take it.

        It is lost then, a later poll says so, and its requests are to be aborted.
        """
        payload = self._codec.encode(message)
        if frontend_id != LAUNCHING_FRONTEND:
            return self._attach_port is not None and self._attach_port.send(frontend_id, payload)
        return self._send_local(message, payload)

    def broadcast(self, message: FrontendBound) -> None:
        """Queue `message` for the launching frontend and every attached one."""
        payload = self._codec.encode(message)
        self._send_local(message, payload)
        if self._attach_port is not None:
            self._attach_port.broadcast(payload)

    def _send_local(self, message: FrontendBound, payload: bytes) -> bool:
        if self._local_queue is not _LocalQueue.INTACT:
            return False
        if self._local.send(payload):
            return True
        if isinstance(message, ResponseBatch):
            log.error("the launching frontend does not read its results")
            self._local_queue = _LocalQueue.LOSSY
            self._lost.append(FrontendLost(LAUNCHING_FRONTEND))
        return False

    def _tell_local(self) -> None:
        """Tell a launching frontend that missed results as soon as it reads again: nothing else would end them."""
        if self._local_queue is _LocalQueue.LOSSY:
            notice = WorkerStopping(self._spec.epoch, "results were lost, since the frontend did not read them")
            if self._local.send(self._codec.encode(notice)):
                self._local_queue = _LocalQueue.TOLD

    def wake(self) -> None:
        """Make the current or next `poll` return at once; from any thread, until `close`."""
        self._wake.set()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets; queued results may still be taken for `linger_s`. Nothing may be called afterwards."""
        linger_ms = int(linger_s * 1000)
        if self._attach_port is not None:
            self._attach_port.close(linger_ms)
        self._local.close(linger_ms)
        self._init.close()
        self._end_context()

    def _end_context(self) -> None:
        """Wait until all closed sockets are gone; the guard goes last, since a handshake may still need it."""
        self._context.term()
        if self._guard is not None:
            self._guard.close()
        self._wake.close()
