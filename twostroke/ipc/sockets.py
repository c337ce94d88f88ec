"""The options that all ZMQ sockets of the executor boundary share, and addresses."""

import os
import socket as system_socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from twostroke.ipc.codec import MAX_MESSAGE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# As numbers, since flags of an enum are slow to combine and to look up.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_CONTROL_FACTOR = 4
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 - recognised here, not bound


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of one socket's queues.

    Attributes:
        messages: High-water mark, each way, in messages.
    """

    messages: int = 4096

    @property
    def control(self) -> int:
        """Messages in front of a socket at which aborts and control stop too: they get in where requests do not."""
        return self.messages * _CONTROL_FACTOR


def open_socket(context: Context, kind: int, limits: QueueLimits) -> Socket:
    """A socket with bounded queues and messages that never delays its closing.

    ZMQ's own heartbeats stay off: together with a full queue of what came in they abort the process (libzmq 4.3.5,
    issues 3937 and 4364). Both ends of a connection say that they live, and take silence for death.
    """
    opened = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, limits.messages)
    opened.setsockopt(zmq.RCVHWM, limits.messages)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return opened


def is_readable(opened: Socket) -> bool:
    """Whether a message waits."""
    return bool(int(opened.getsockopt(_EVENTS)) & _POLLIN)


def try_receive(opened: Socket) -> list[bytes] | None:
    """The frames of the next message, or None if none waits."""
    if not is_readable(opened):  # asking first is several times cheaper than the exception of an empty receive
        return None
    try:
        frame = opened.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more:  # known from the frame itself, without asking the socket
        frame = opened.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames


def try_send(opened: Socket, frames: Sequence[bytes]) -> bool:
    """Queue a message; False if the queue is full or, on a ROUTER, the peer is unknown."""
    *parts, last = frames
    try:
        for part in parts:
            opened.send(part, _NOBLOCK_MORE)
        opened.send(last, _NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True


def advertised_address(bound: str, advertise: str | None) -> str:
    """The address to give to peers.

    Args:
        bound: What the socket is bound to, as ZMQ's LAST_ENDPOINT says it (`tcp://host:port`).
        advertise: Host to name instead; None keeps the bound one, or takes the host name's address for a wildcard.
    """
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    if advertise is not None:
        host = advertise
    elif host in _WILDCARDS:
        host = system_socket.gethostbyname(system_socket.gethostname())
    return f"tcp://{host}:{port}"


class Wake:
    """Interrupts a `zmq.Poller` from any thread (an eventfd)."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        """Wake the poller, now or at its next poll; nothing happens after `close`."""
        with self._lock:  # the descriptor's number may belong to something else once it is closed
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget the wakes so far."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return  # nothing to forget

    def close(self) -> None:
        """Free the descriptor."""
        with self._lock:
            self._closed = True
            os.close(self.descriptor)
