"""The floor of any message queue here: two processes that pass bytes over pyzmq, and do nothing else.

The parent sends a request; the child answers it with as many messages of as many bytes as the request says. No
encoding, no authentication, no threads of ours: a PUSH and a PULL each, over local sockets as the ipc form has them.
`python -m benchmarks.zmq_echo FOLDER` is the child.
"""

import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

_HEAD = struct.Struct("<II")  # how many answers, of how many bytes
_DEADLINE_MS = 10_000
_END = b""


class Echo:
    """The parent's end.

    Attributes:
        pid: Of the child.
    """

    def __init__(self, folder: str, pid: int) -> None:
        self.pid = pid
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = _connect(self._context, zmq.PUSH, folder)
        self._answers = _connect(self._context, zmq.PULL, folder)

    def send(self, request_bytes: int, answers: int, answer_bytes: int) -> None:
        """Ask for `answers` messages of `answer_bytes` each."""
        self._requests.send(_HEAD.pack(answers, answer_bytes).ljust(request_bytes, b"\0"))

    def receive(self) -> bytes:
        """The next answer.

        Raises:
            zmq.Again: None came in time.
        """
        return self._answers.recv()

    def close(self) -> None:
        """End the child."""
        self._requests.setsockopt(zmq.LINGER, _DEADLINE_MS)
        self._requests.send(_END)
        self._requests.close()
        self._answers.close()
        self._context.term()


@contextmanager
def echo() -> Iterator[Echo]:
    """A running child and the sockets to it."""
    with tempfile.TemporaryDirectory(prefix="echo-") as folder:
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.zmq_echo", folder])
        end = Echo(folder, child.pid)
        try:
            yield end
        finally:
            end.close()
            child.wait(_DEADLINE_MS / 1000)


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, folder: str) -> "zmq.Socket[bytes]":
    opened = context.socket(kind)
    opened.setsockopt(zmq.RCVTIMEO, _DEADLINE_MS)
    opened.setsockopt(zmq.SNDTIMEO, _DEADLINE_MS)
    opened.setsockopt(zmq.RECONNECT_IVL, 10)
    opened.connect(_address(folder, to_child=kind == zmq.PUSH))
    return opened


def _address(folder: str, *, to_child: bool) -> str:
    return f"ipc://{folder}/{'requests' if to_child else 'answers'}"


def _answer(folder: str) -> None:
    """The child: answer until told to end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    requests, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    answers.setsockopt(zmq.LINGER, 0)
    requests.bind(_address(folder, to_child=True))
    answers.bind(_address(folder, to_child=False))
    while (request := requests.recv()) != _END:
        count, size = _HEAD.unpack_from(request)
        payload = bytes(size)
        for _ in range(count):
            answers.send(payload)
    requests.close()
    answers.close()
    context.term()


if __name__ == "__main__":
    _answer(sys.argv[1])
