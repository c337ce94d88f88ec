"""The launching frontend's end of the three local queues. Each object belongs to the one thread that made it."""

from typing import Generic, TypeVar

import zmq

from twostroke.ipc.codec import Codec, init_ack_codec, init_status_codec, result_codec
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.seal import Direction, Sealer, SealError, Unsealer
from twostroke.ipc.sockets import Context, QueueLimits, Socket, open_socket, try_receive, try_send
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.responses import FrontendBound
from twostroke.protocol.worker import InitAck, InitStatus

_RECONNECT_MS = 10  # the worker binds its queues a little after they are connected to

Message = TypeVar("Message", bound=InitStatus | FrontendBound)


def _connect(context: Context, kind: int, address: str, limits: QueueLimits) -> Socket:
    opened = open_socket(context, kind, limits)
    opened.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    opened.connect(address)
    return opened


class RequestSender:
    """Sends encoded requests to the worker."""

    def __init__(self, context: Context, spec: LaunchSpec, limits: QueueLimits) -> None:
        self._sealer = Sealer(spec.session, Direction.REQUEST)
        self._socket = _connect(context, zmq.PUSH, spec.request_address, limits)
        self._waiting: list[bytes] | None = None

    def send(self, payload: bytes, timeout_s: float) -> bool:
        """Send one encoded message; False if there was no room within `timeout_s`: then send the same one again."""
        if self._waiting is None:
            self._waiting = self._sealer.seal(payload)
        sent = try_send(self._socket, self._waiting)
        if not sent and self._socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
            sent = try_send(self._socket, self._waiting)
        if sent:
            self._waiting = None
        return sent

    def close(self) -> None:
        """Close the socket; what is queued is given up."""
        self._socket.close()


class _Opener(Generic[Message]):
    """Opens the sealed messages of one direction; drops and counts what is not of this launch."""

    def __init__(self, spec: LaunchSpec, direction: Direction, codec: Codec[Message], drops: DropCounters) -> None:
        self._epoch = spec.epoch
        self._codec: Codec[Message] = codec
        self._drops = drops
        self._unsealer = Unsealer(spec.session, direction)

    def open(self, frames: list[bytes]) -> Message | None:
        """The message in `frames`, or None if it was dropped."""
        try:
            message = self._codec.decode(self._unsealer.unseal(frames))
        except SealError as error:
            self._drops.count(error.reason)
        except ProtocolError:
            self._drops.count(DropReason.MALFORMED)
        else:
            if message.epoch == self._epoch:
                return message
            self._drops.count(DropReason.WRONG_EPOCH)
        return None


class ResultReceiver:
    """Receives what the worker sends."""

    def __init__(self, context: Context, spec: LaunchSpec, limits: QueueLimits, drops: DropCounters) -> None:
        self._opener: _Opener[FrontendBound] = _Opener(spec, Direction.RESULT, result_codec(), drops)
        self.socket = _connect(context, zmq.PULL, spec.result_address, limits)

    def receive(self, limit: int) -> list[FrontendBound]:
        """What has arrived, in order, at most `limit` messages."""
        messages: list[FrontendBound] = []
        for _ in range(limit):
            frames = try_receive(self.socket)
            if frames is None:
                break
            message = self._opener.open(frames)
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class InitStatusReceiver:
    """Receives how the start of a world goes, and acknowledges each message."""

    def __init__(self, context: Context, spec: LaunchSpec, limits: QueueLimits, drops: DropCounters) -> None:
        self._epoch = spec.epoch
        self._ack_codec = init_ack_codec()
        self._opener: _Opener[InitStatus] = _Opener(spec, Direction.INIT_STATUS, init_status_codec(), drops)
        self._sealer = Sealer(spec.session, Direction.INIT_ACK)
        self.socket = _connect(context, zmq.REP, spec.init_address, limits)

    def receive(self) -> InitStatus | None:
        """The next status, acknowledged; None if none waits or the message was dropped."""
        frames = try_receive(self.socket)
        if frames is None:
            return None
        status = self._opener.open(frames)
        # A REP socket has to answer before it receives again; what is not of this launch gets an empty answer.
        ack = self._sealer.seal(self._ack_codec.encode(InitAck(self._epoch)))
        try_send(self.socket, [b""] if status is None else ack)
        return status

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
