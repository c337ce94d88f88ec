"""A child process and the pipe to it: orders go in, answers come out, each with a deadline.

UCX and libraries print to stdout, so the pipe is one of its own. The last lines of what the child printed are told when
it ends too early.
"""

import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Generic, Self, TypeVar

import msgspec

Order = TypeVar("Order")
Answer = TypeVar("Answer")
_CLOSE_S = 5.0
_LAST_LINES = 8


class ChildPipe(Generic[Order, Answer]):
    """A child of a part; a context manager that leaves no process behind.

    Args:
        module: Run as `python -m MODULE FD ARGUMENT...`, where the descriptor is the child's end of the pipe.
        arguments: The rest of its command line.
        answers: What it may answer.
    """

    def __init__(self, module: str, arguments: list[str], answers: type[Answer]) -> None:
        ours, its = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pipe
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(its.fileno()), *arguments],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )
        its.close()
        self.connection = Connection(ours.detach())
        self._decoder = msgspec.msgpack.Decoder(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # it ends by itself then, and frees what it holds of the GPU
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._printed.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill it as `kill -9` does, and wait until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_CLOSE_S)

    def order(self, order: Order) -> None:
        """Give an order."""
        try:
            self.connection.send_bytes(msgspec.msgpack.encode(order))
        except OSError:
            raise self._ended() from None

    def answer(self, timeout_s: float) -> Answer:
        """The next answer.

        Raises:
            TimeoutError: There was none in time.
            RuntimeError: The child has ended.
        """
        try:
            if not self.connection.poll(timeout_s):
                raise TimeoutError(f"process {self.process.pid} said nothing in {timeout_s:g} s:\n{self.last_lines()}")
            return self._decoder.decode(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._ended() from None

    def last_lines(self) -> str:
        """Of what the child printed."""
        self._printed.seek(0)
        return "\n".join(self._printed.read().decode(errors="replace").splitlines()[-_LAST_LINES:])

    def _ended(self) -> RuntimeError:
        status = self.process.wait(_CLOSE_S)
        return RuntimeError(f"process {self.process.pid} ended with status {status}:\n{self.last_lines()}")
