"""A frontend's end of a worker's TCP port: one CURVE DEALER for one attachment. Never blocks.

The socket has a fresh random identity and connects once: it is never reconnected, since messages lost in between would
go unnoticed. A lost connection therefore ends the attachment, and `failure` says so as soon as ZMQ notices.

Both descriptors are edge-triggered the ZMQ way: they become readable when something changed. After any send or receive
the owner looks at `readable` again.
"""

import secrets
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from twostroke.ipc.codec import request_codec, result_codec
from twostroke.ipc.curve import secure_client
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.sockets import (
    Context,
    QueueLimits,
    is_readable,
    open_socket,
    try_receive,
    try_send,
)
from twostroke.protocol.errors import EngineDeadError, ProtocolError
from twostroke.protocol.requests import RequestEnvelope, WorkerBound
from twostroke.protocol.responses import FrontendBound

LEAVING_LINGER_MS = 500
"""How long a frontend that leaves may still take to get its last aborts out."""

_IDENTITY_BYTES = 16
_NEVER_MS = 24 * 3600 * 1000
"""To the next try to connect. With `IMMEDIATE`, or with -1 here, ZMQ drops what has arrived and was not read when it
notices that the connection is lost: the last tokens of a worker that ended in order."""
_NO_MESSAGE = b""  # does not decode: a message has one frame
_FAILURES = {
    zmq.EVENT_DISCONNECTED: "the connection was lost",
    zmq.EVENT_CLOSED: "the connection was refused or closed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed; do both sides use the same secret file?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed; is that a worker's port, and the secret file the same?",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the worker refused the key; do both sides use the same secret file?",
}


class AttachClient:
    """The socket of one attachment; owned by one loop or thread.

    Args:
        context: ZMQ context.
        address: The worker's port (`tcp://host:port`).
        secret: The cluster secret.
        limits: Bounds of the queues.
        drops: Counts what is dropped.

    Raises:
        EngineDeadError: ZMQ does not take the address.
    """

    def __init__(self, context: Context, address: str, secret: bytes, limits: QueueLimits, drops: DropCounters) -> None:
        self._drops = drops
        self._codec, self._result_codec = request_codec(), result_codec()
        self._socket = open_socket(context, zmq.DEALER, limits)
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(_IDENTITY_BYTES))
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        secure_client(self._socket, secret)
        self._monitor = self._socket.get_monitor_socket(sum(_FAILURES))
        self._failure: str | None = None
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineDeadError(f"cannot connect to worker {address!r}: {error}") from None

    def descriptors(self) -> tuple[int, int]:
        """The descriptors to watch for reading: the socket's and its connection monitor's."""
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """Whether a message waits."""
        return is_readable(self._socket)

    def encode(self, epoch: int, body: WorkerBound) -> bytes:
        """A message as `send_bundle` takes it.

        Raises:
            ProtocolError: The message is too large.
        """
        return self._codec.encode(RequestEnvelope(epoch, body))

    def send_bundle(self, payloads: Sequence[bytes]) -> bool:
        """Queue 1 to `MAX_BUNDLE` encoded messages, for a connection too; False, and none is, if the queue is full."""
        return try_send(self._socket, payloads)

    def send(self, epoch: int, body: WorkerBound) -> bool:
        """Queue one message; errors as `encode`, result as `send_bundle`."""
        return self.send_bundle((self.encode(epoch, body),))

    def receive(self, limit: int) -> tuple[list[FrontendBound], bool]:
        """What has arrived, in order, at most `limit` messages; the flag says whether nothing was left waiting."""
        messages: list[FrontendBound] = []
        for _ in range(limit):
            frames = try_receive(self._socket)
            if frames is None:
                return messages, True
            try:
                messages.append(self._result_codec.decode(frames[0] if len(frames) == 1 else _NO_MESSAGE))
            except ProtocolError:
                self._drops.count(DropReason.MALFORMED)
        return messages, False

    def failure(self) -> str | None:
        """Why the connection is gone, or None while it is there or being made. The first reason stays."""
        while (frames := try_receive(self._monitor)) is not None:
            event = parse_monitor_message(frames)["event"]
            if self._failure is None:
                self._failure = _FAILURES.get(zmq.Event(event))
        return self._failure

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is queued gets `linger_ms` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
