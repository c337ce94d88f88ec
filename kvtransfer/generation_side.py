"""The generation side's I/O: a control socket and an inlet for each context worker; `receiver` decides."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog
import zmq

from kvtransfer.backend import Backend, BackendError, BlockBuffer, Inlet
from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.device import StepFence
from kvtransfer.events import BlocksSafe, FetchEnded, TransferEvent
from kvtransfer.fetch_gate import FetchGate
from kvtransfer.options import TransferOptions
from kvtransfer.process_watch import ProcessWatch, is_elsewhere, watch_process
from kvtransfer.receiver import (
    CloseInlet,
    Fetch,
    FetchBook,
    GenerationAction,
    PeerName,
    RequestBlocks,
    Send,
)
from twostroke.ipc.codec import Codec
from twostroke.ipc.curve import secure_client
from twostroke.ipc.sockets import Context, QueueLimits, Socket, open_socket, try_receive, try_send
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, Reserve, ToContext, ToGeneration

log = structlog.get_logger(__name__)

_MESSAGES_A_TURN = 256


@dataclass(slots=True)
class _Link:
    """What leads to one start of one context worker.

    The inlet is closed when safety demands and opened anew. The process is watched where its exit is the only proof,
    from before it is asked to write; a peer on another host cannot reach into our memory by itself, so that a closed
    inlet is proof there.
    """

    socket: Socket
    inlet: Inlet | None
    used: float
    watch: ProcessWatch | None
    elsewhere: bool


class GenerationSide:
    """Fetches blocks; used by the transfer thread alone.

    Args:
        book: The protocol.
        epoch: Of this worker.
        context: For control sockets.
        backend: The transport.
        buffer: Our blocks.
        options: Settings.
        counters: Counted into.
        emit: Takes events for the engine thread.
    """

    def __init__(
        self,
        book: FetchBook,
        epoch: int,
        context: Context,
        backend: Backend,
        buffer: BlockBuffer,
        *,
        options: TransferOptions,
        counters: TransferCounters,
        emit: Callable[[TransferEvent], None],
    ) -> None:
        self.book = book
        self._epoch = epoch
        self._context = context
        self._backend = backend
        self._buffer = buffer
        self._options = options
        self._counters = counters
        self._emit = emit
        self._gate = FetchGate(counters)
        self._links: dict[PeerName, _Link] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._codec: Codec[ToGeneration] = Codec(msgspec.msgpack.Decoder(ToGeneration))

    @property
    def held(self) -> int:
        """Fetches that wait until the device is done with their blocks: nothing but asking again will tell."""
        return self._gate.held

    @property
    def sources(self) -> list[Socket | int]:
        """Control sockets and descriptors, to be polled."""
        links = self._links.values()
        watched = (link.watch.fd for link in links if link.watch)
        return [*(link.socket for link in links), *(fd for fd in watched if fd is not None)]

    def fetch(self, fetch: Fetch, fence: StepFence, now: float) -> None:
        """A new fetch; it begins at once, or with the first `request` that finds `fence` reached."""
        if fence.reached():
            self.carry_out(self.book.fetch(fetch, now), now)
        else:
            self._gate.admit(fetch, fence)

    def request(self, now: float) -> None:
        """Begin the fetches whose blocks may be written now."""
        for fetch in self._gate.release():
            self.carry_out(self.book.fetch(fetch, now), now)

    def cancel(self, transfer_id: int, now: float) -> None:
        """Give a fetch up, whether it has begun or not."""
        ended = self._gate.cancel(transfer_id)
        self.carry_out([ended] if ended else self.book.cancel(transfer_id, now), now)

    def cancel_all(self, now: float) -> None:
        """Give every fetch up: the worker shuts down."""
        self.carry_out([*self._gate.cancel_all(), *self.book.cancel_all(now)], now)

    def receive(self, now: float) -> None:
        """Take in what context workers sent, up to a bound a turn and peer."""
        for name, link in list(self._links.items()):
            for _ in range(_MESSAGES_A_TURN):
                frames = try_receive(link.socket)
                if frames is None:
                    break
                self._take(name, frames, now)

    def _take(self, name: PeerName, frames: list[bytes], now: float) -> None:
        try:
            message = self._codec.decode(b"".join(frames))
        except ProtocolError as error:
            self._counters.dropped[DropReason.UNDECODABLE] += 1
            log.warning("dropped a control message", address=name.address, error=str(error))
            return
        self.carry_out(self.book.receive(name, message, now), now)

    def tick(self, now: float) -> None:
        """Do what is due, and close what leads to peers that have been idle for long."""
        self.carry_out([*self._gate.tick(now), *self.book.tick(now)], now)
        for name, link in list(self._links.items()):
            if link.watch is not None and link.watch.exited():
                self.carry_out(self.book.writer_exited(name), now)
        for name, link in list(self._links.items()):
            if self.book.busy(name):
                link.used = now
            elif now - link.used >= self._options.timeouts.idle_s:
                self._drop(name)

    def carry_out(self, actions: Iterable[GenerationAction], now: float) -> None:
        """Do what the protocol decided."""
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case RequestBlocks(fetch):
                    pending.extend(self._request(fetch, now))
                case Send(peer, message):
                    self._send(peer, message)
                case CloseInlet(peer):
                    pending.extend(self._close_inlet(peer))
                case (FetchEnded() | BlocksSafe()) as event:
                    self._emit(event)

    def shut(self, now: float) -> None:
        """Close all inlets, which ends every fetch whose safety that proves, and all sockets."""
        for name in list(self._links):
            self.carry_out(self._close_inlet(name), now)
            self._drop(name)

    def _request(self, fetch: Fetch, now: float) -> list[GenerationAction]:
        try:
            link = self._link(fetch, now)
            if link.inlet is None:
                link.inlet = self._backend.open_inlet()
        except (BackendError, OSError, zmq.ZMQError) as error:
            reason = f"cannot connect to the context worker at {fetch.peer.address}: {error}"
            return self.book.not_sent(fetch, reason)
        if not self._send(fetch.peer, self._reserve(fetch, link.inlet)):
            return self.book.not_sent(fetch, f"the queue to the context worker at {fetch.peer.address} is full")
        return []

    def _reserve(self, fetch: Fetch, inlet: Inlet) -> Reserve:
        return Reserve(
            version=TRANSFER_VERSION,
            transfer_id=fetch.transfer_id,
            epoch=self._epoch,
            handle=fetch.handle,
            positions=pack_tokens(fetch.positions),
            blocks=pack_tokens(fetch.blocks),
            base=self._buffer.address,
            block_bytes=self._buffer.block_bytes,
            num_blocks=self._buffer.num_blocks,
            peer_address=inlet.address,
            rkey=inlet.key,
            deadline_s=fetch.deadline_s,
        )

    def _link(self, fetch: Fetch, now: float) -> _Link:
        """What leads to the peer of `fetch`, connected if it is new.

        A message may wait in the socket for a connection, even to a later epoch at the same address: that one refuses
        it by its epoch.

        Raises:
            zmq.ZMQError: The address is not one.
            OSError: The writer's process cannot be watched.
        """
        link = self._links.get(fetch.peer)
        if link is None:
            writer = fetch.handle.process
            socket = open_socket(self._context, zmq.DEALER, QueueLimits(self._options.limits.messages))
            secure_client(socket, self._options.secret)
            try:
                socket.connect(fetch.peer.address)
                watch = None if self._backend.close_is_proof else watch_process(writer)
            except (zmq.ZMQError, OSError):
                socket.close()
                raise
            link = self._links[fetch.peer] = _Link(socket, None, now, watch, is_elsewhere(writer))
        return link

    def _send(self, name: PeerName, message: ToContext) -> bool:
        link = self._links.get(name)
        if link is None or not try_send(link.socket, [self._encoder.encode(message)]):
            self._counters.dropped[DropReason.UNDELIVERABLE] += 1
            return False
        return True

    def _close_inlet(self, name: PeerName) -> list[GenerationAction]:
        link = self._links.get(name)
        if link is None or link.inlet is None:
            return []
        link.inlet.close()
        link.inlet = None
        return self.book.inlet_closed(name, proof=link.elsewhere or self._backend.close_is_proof)

    def _drop(self, name: PeerName) -> None:
        link = self._links.pop(name)
        if link.inlet is not None:
            link.inlet.close()
        if link.watch is not None:
            link.watch.close()
        link.socket.close()
