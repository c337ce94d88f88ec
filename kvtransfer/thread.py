"""The transfer thread: the one thread that touches control sockets and UCX.

    start -> bind, register memory -> turns -> close requested -> revoke and cancel all -> last turns -> shut -> end

One turn: commands, control messages, transport progress, writes, timers; then sleep on the eventfd of commands, the
sockets and the transport's descriptors. It wakes for work alone, for timers while leases or fetches are open, and every
millisecond while one waits for the device. In its first idle turns it populates the cache's pages instead of sleeping.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq

from kvtransfer.backend import Backend, BlockBuffer
from kvtransfer.context_side import ContextSide
from kvtransfer.counters import TransferCounters
from kvtransfer.device import MemoryDevice, StepFence
from kvtransfer.events import TransferEvent
from kvtransfer.generation_side import GenerationSide
from kvtransfer.handles import handle_key
from kvtransfer.options import TransferOptions
from kvtransfer.page_population import PagePopulation
from kvtransfer.receiver import Fetch, FetchBook
from kvtransfer.reservation import ContextTerms
from kvtransfer.sender import LeaseBook
from twostroke.ipc.curve import CurveGuard, secure_server
from twostroke.ipc.sockets import Context, QueueLimits, Socket, advertised_address, open_socket
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import LayoutFingerprint

log = structlog.get_logger(__name__)

_TICK_S = 0.05
_IDLE_SLEEP_S = 1.0
_FENCE_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class OfferCommand:
    """A lease starts."""

    key: SequenceKey
    blocks: tuple[int, ...]
    expiry_s: float
    fence: StepFence


@dataclass(frozen=True, slots=True)
class RevokeCommand:
    """A lease is taken back."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class FetchCommand:
    """A fetch starts."""

    fetch: Fetch
    fence: StepFence


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """A fetch is given up."""

    transfer_id: int


Command = OfferCommand | RevokeCommand | FetchCommand | CancelCommand


class TransferThread:
    """Runs both sides of one agent.

    Args:
        options: Settings.
        epoch: Of this worker.
        layout: Of its cache.
        buffer: Its cache's memory.
        device: What computes in that memory.
        open_backend: Makes the transport, on the transfer thread.
        emit: Takes events; thread-safe.
        wake: Called after events were emitted.
    """

    def __init__(
        self,
        options: TransferOptions,
        epoch: int,
        layout: LayoutFingerprint,
        buffer: BlockBuffer,
        *,
        device: MemoryDevice,
        open_backend: Callable[[], Backend],
        emit: Callable[[TransferEvent], None],
        wake: Callable[[], None],
    ) -> None:
        self.counters = TransferCounters()
        self.failure: BaseException | None = None
        self._options = options
        self._epoch = epoch
        self._layout = layout
        self._buffer = buffer
        self._device = device
        self._open_backend = open_backend
        self._emit_to_engine = emit
        self._wake = wake
        self._events: list[TransferEvent] = []
        self._commands: deque[Command] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready = threading.Event()
        self._address = ""
        self._close_by = math.inf
        self._next_tick = 0.0
        self._pages = PagePopulation(buffer)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> str:
        """Run; the control endpoint's address for handles, once everything is bound and registered.

        Raises:
            TimeoutError: That took longer than `timeouts.start_s`.
            Exception: Whatever kept it from starting.
        """
        self._thread.start()
        if not self._ready.wait(self._options.timeouts.start_s):
            raise TimeoutError(f"the transfer agent did not start in {self._options.timeouts.start_s} s")
        if self.failure is not None:
            raise self.failure
        return self._address

    def post(self, command: Command) -> None:
        """Queue a command and wake the thread; for one calling thread."""
        self._commands.append(command)
        os.eventfd_write(self._event, 1)

    def close(self, deadline_s: float) -> None:
        """End the thread; see `TransferAgent.close`."""
        if not self._thread.is_alive():
            return
        self._close_by = time.monotonic() + deadline_s / 2
        os.eventfd_write(self._event, 1)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the transfer thread did not end in {deadline_s} s")
        os.close(self._event)

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                self._serve(context)
        except Exception as error:  # the engine thread raises it again, from `poll`
            log.exception("the transfer thread failed")
            self.failure = error
            self._wake()
        finally:
            self._ready.set()

    def _serve(self, context: Context) -> None:
        guard = CurveGuard(context, self._options.secret)
        socket = open_socket(context, zmq.ROUTER, QueueLimits(self._options.limits.messages))
        backend: Backend | None = None
        try:
            self._device.enter_thread()
            backend = self._open_backend()
            backend.register(self._buffer)
            self._bind(socket)
            contexts, generations = self._sides(context, socket, backend)
            self._ready.set()
            while not self._finished(contexts, generations):
                self._turn(contexts, generations, backend)
            self._shut(contexts, generations)
        finally:
            socket.close()
            if backend is not None:
                backend.close()
            guard.close()

    def _bind(self, socket: Socket) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secure_server(socket, self._options.secret)
        socket.bind(self._options.bind)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        text = bound.decode().rstrip("\0") if isinstance(bound, bytes) else str(bound)
        self._address = advertised_address(text, self._options.advertise)
        log.info("transfer agent bound", address=self._address, epoch=f"{self._epoch:x}")

    def _sides(self, context: Context, socket: Socket, backend: Backend) -> tuple[ContextSide, GenerationSide]:
        options, counters = self._options, self.counters
        key = handle_key(options.secret)
        terms = ContextTerms(self._epoch, key, self._layout, self._buffer.block_bytes)
        contexts = ContextSide(
            LeaseBook(terms, options.timeouts, options.limits, counters),
            socket,
            backend,
            self._buffer,
            timeouts=options.timeouts,
            limits=options.limits,
            counters=counters,
            emit=self._emit,
        )
        generations = GenerationSide(
            FetchBook(self._epoch, self._layout, options.timeouts, counters),
            self._epoch,
            context,
            backend,
            self._buffer,
            options=options,
            counters=counters,
            emit=self._emit,
        )
        return contexts, generations

    def _turn(self, contexts: ContextSide, generations: GenerationSide, backend: Backend) -> None:
        now = time.monotonic()
        self._obey(contexts, generations, now)
        contexts.receive(now)
        generations.receive(now)
        generations.request(now)
        moved = backend.progress()
        moved |= contexts.write(now)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            contexts.tick(now)
            generations.tick(now)
        self._publish(contexts, generations)
        if not moved and backend.arm():
            self._sleep(contexts, generations, backend)

    def _sleep(self, contexts: ContextSide, generations: GenerationSide, backend: Backend) -> None:
        counters = self.counters
        open_work = counters.leases_open + counters.fetches_open + counters.quarantined + counters.parked
        if not open_work and self._pages.advance():
            return
        poller = zmq.Poller()
        for source in (self._event, contexts.socket, *generations.sources, *backend.file_descriptors()):
            poller.register(source, zmq.POLLIN)
        sleep_s = _TICK_S if open_work or self._close_by < math.inf else _IDLE_SLEEP_S
        if contexts.fenced or generations.held:
            sleep_s = _FENCE_POLL_S
        ready = dict(poller.poll(int(1000 * sleep_s)))
        if self._event in ready:
            os.eventfd_read(self._event)

    def _obey(self, contexts: ContextSide, generations: GenerationSide, now: float) -> None:
        while self._commands:
            match self._commands.popleft():
                case OfferCommand(key, blocks, expiry_s, fence):
                    contexts.carry_out(contexts.book.offer(key, blocks, expiry_s, now, fence), now)
                case RevokeCommand(key):
                    contexts.carry_out(contexts.book.revoke(key, now), now)
                case FetchCommand(fetch, fence):
                    generations.fetch(fetch, fence, now)
                case CancelCommand(transfer_id):
                    generations.cancel(transfer_id, now)

    def _finished(self, contexts: ContextSide, generations: GenerationSide) -> bool:
        """Whether to shut now; gives everything up as soon as `close` asks for the end."""
        if self._close_by == math.inf:
            return False
        now = time.monotonic()
        self._obey(contexts, generations, now)  # what was asked for before the close gets its end, too
        contexts.carry_out(contexts.book.revoke_all(now), now)
        generations.cancel_all(now)
        self._publish(contexts, generations)
        counters = self.counters
        return now >= self._close_by or not (counters.leases_open + counters.fetches_open + counters.quarantined)

    def _shut(self, contexts: ContextSide, generations: GenerationSide) -> None:
        now = time.monotonic()
        contexts.shut("the worker shuts down", now)
        generations.shut(now)
        self._publish(contexts, generations)

    def _publish(self, contexts: ContextSide, generations: GenerationSide) -> None:
        """Set the gauges, then hand the turn's events over: whoever sees an event sees the gauges that go with it."""
        counters = self.counters
        counters.leases_open = contexts.book.open_leases
        counters.parked = contexts.book.parked
        counters.quarantined = generations.book.quarantined
        counters.fetches_open = generations.book.open_fetches + generations.held

        if not self._events:
            return
        for event in self._events:
            self._emit_to_engine(event)
        self._events.clear()
        self._wake()

    def _emit(self, event: TransferEvent) -> None:
        self._events.append(event)
