"""The context side's I/O: the bound control socket, connections to inlets, and the writes; `sender` decides."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from kvtransfer.backend import Backend, BackendError, BlockBuffer, Connection
from kvtransfer.coalesce import coalesce, slices
from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.events import LeaseEnded, TransferEvent
from kvtransfer.options import TransferLimits, TransferTimeouts
from kvtransfer.sender import (
    BreakConnection,
    ContextAction,
    LeaseBook,
    Reply,
    StartWriting,
    StopWriting,
)
from kvtransfer.writing import Writing
from twostroke.ipc.codec import Codec
from twostroke.ipc.sockets import Socket, try_receive, try_send
from twostroke.protocol.durations import HandoverPart
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import ToContext, ToGeneration

log = structlog.get_logger(__name__)

_MESSAGES_A_TURN = 256
InletName = tuple[int, bytes]
"""(epoch of the generation worker, address of its inlet)."""


@dataclass(slots=True)
class _Link:
    connection: Connection
    used: float


@dataclass(slots=True)
class _Job:
    """A reservation being served.

    The connection is opened when the writes' turn comes, so that a cancellation that is queued right behind a
    reservation, or comes before the blocks are computed, takes effect before anything is written.

    Attributes:
        start: What to write.
        since: Monotonic time of the last of these moments: reserved, first writes issued, last writes issued.
        writing: From the second of them on.
        flushing: From the third of them on.
    """

    start: StartWriting
    since: float
    writing: Writing | None = None
    flushing: bool = False

    @property
    def inlet(self) -> InletName:
        return (self.start.request.epoch, self.start.request.peer_address)

    def lap(self) -> float:
        """Seconds since the last moment; the next one counts from now."""
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        return seconds


class ContextSide:
    """Serves leases; used by the transfer thread alone.

    Args:
        book: The protocol.
        socket: A bound ROUTER.
        backend: The transport.
        buffer: Our blocks.
        timeouts: Durations.
        limits: Bounds.
        counters: Counted into.
        emit: Takes events for the engine thread.
    """

    def __init__(
        self,
        book: LeaseBook,
        socket: Socket,
        backend: Backend,
        buffer: BlockBuffer,
        *,
        timeouts: TransferTimeouts,
        limits: TransferLimits,
        counters: TransferCounters,
        emit: Callable[[TransferEvent], None],
    ) -> None:
        self.book = book
        self.socket = socket
        self._backend = backend
        self._buffer = buffer
        self._timeouts = timeouts
        self._limits = limits
        self._counters = counters
        self._emit = emit
        self._jobs: dict[SequenceKey, _Job] = {}
        self._links: dict[InletName, _Link] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._codec: Codec[ToContext] = Codec(msgspec.msgpack.Decoder(ToContext))

    @property
    def writing(self) -> bool:
        """Whether any transfer is being served."""
        return bool(self._jobs)

    @property
    def fenced(self) -> bool:
        """Whether any transfer waits for its blocks to be computed: nothing but asking again will tell."""
        return any(job.writing is None for job in self._jobs.values())

    def receive(self, now: float) -> None:
        """Take in what generation workers sent, up to a bound a turn."""
        for _ in range(_MESSAGES_A_TURN):
            frames = try_receive(self.socket)
            if frames is None:
                return
            try:
                message = self._codec.decode(b"".join(frames[1:]))
            except ProtocolError as error:
                self._counters.dropped[DropReason.UNDECODABLE] += 1
                log.warning("dropped a control message", error=str(error))
                continue
            self.carry_out(self.book.receive(frames[0], message, now), now)

    def write(self, now: float) -> bool:
        """Advance all writes; True if anything moved."""
        moved = False
        for key, job in list(self._jobs.items()):
            if key not in self._jobs:
                continue  # ended with a connection that broke in this turn
            try:
                moved |= self._advance(key, job, now)
            except BackendError as error:
                self._break(job.inlet, str(error), now)
                moved = True
        return moved

    def tick(self, now: float) -> None:
        """Do what is due, and close connections that have been idle for long."""
        self.carry_out(self.book.tick(now), now)
        busy = {job.inlet for job in self._jobs.values()}
        for inlet, link in list(self._links.items()):
            if inlet not in busy and now - link.used >= self._timeouts.idle_s:
                del self._links[inlet]
                link.connection.close()

    def carry_out(self, actions: Iterable[ContextAction], now: float) -> None:
        """Do what the protocol decided.

        A connection that breaks ends every lease on it, also those that a later action of the same list is about:
        nothing is left to do for them.
        """
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case Reply(route, message):
                    self._reply(route, message)
                case StartWriting(key) as start:
                    self._jobs[key] = _Job(start, now)
                case StopWriting(key) if key in self._jobs:
                    pending.extend(self._stop(key))
                case BreakConnection(key, reason) if key in self._jobs:
                    self._break(self._jobs[key].inlet, reason, now)
                case LeaseEnded() as ended:
                    self._emit(ended)

    def shut(self, reason: str, now: float) -> None:
        """Break all connections, so that every lease that is still served ends."""
        for inlet in {job.inlet for job in self._jobs.values()} | set(self._links):
            self._break(inlet, reason, now)

    def _reply(self, route: bytes, message: ToGeneration) -> None:
        if not try_send(self.socket, [route, self._encoder.encode(message)]):
            self._counters.dropped[DropReason.UNDELIVERABLE] += 1

    def _stop(self, key: SequenceKey) -> list[ContextAction]:
        job = self._jobs[key]
        if job.writing is None:
            del self._jobs[key]
            return self.book.stopped(key)
        job.writing.stop()
        return []

    def _advance(self, key: SequenceKey, job: _Job, now: float) -> bool:
        times = self._counters.times
        if job.writing is None:
            if not job.start.fence.reached():
                return False
            job.writing = self._open(job, now)
            moved = job.writing.advance()
            times[HandoverPart.FIRST_PUT].observe(job.lap())
        else:
            moved = job.writing.advance()
        if job.writing.flushing and not job.flushing:
            job.flushing = True
            times[HandoverPart.WRITE].observe(job.lap())
        if not job.writing.landed():
            return moved
        times[HandoverPart.FLUSH].observe(job.lap())
        del self._jobs[key]
        self._links[job.inlet].used = now
        ended = self.book.stopped(key) if job.writing.stopping else self.book.written(key)
        self.carry_out(ended, now)
        return True

    def _open(self, job: _Job, now: float) -> Writing:
        request, copies = job.start.request, job.start.copies
        link = self._links.get(job.inlet)
        if link is None:
            connection = self._backend.connect(request.peer_address, request.rkey)
            link = self._links[job.inlet] = _Link(connection, now)
        max_blocks = max(1, self._limits.operation_bytes // self._buffer.block_bytes)
        return Writing(
            link.connection,
            slices(coalesce(copies.positions, job.start.leased, copies.blocks), max_blocks),
            self._buffer,
            request.base,
            limits=self._limits,
            counters=self._counters,
        )

    def _break(self, inlet: InletName, reason: str, now: float) -> None:
        """Close a connection and fail every lease on it."""
        link = self._links.pop(inlet, None)
        if link is not None:
            link.connection.close()
        for key, job in list(self._jobs.items()):
            if job.inlet == inlet:
                del self._jobs[key]
                log.warning("a transfer failed", key=str(key), reason=reason)
                self.carry_out(self.book.failed(key, reason), now)
