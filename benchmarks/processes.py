"""Processes that a benchmark starts: their logs, their readiness, their processor time, their end."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 90.0
_STOP_S = 5.0
_POLL_S = 0.05
_NS_PER_US = 1000


@contextmanager
def running(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with its output in `log`; it is ended with the context.

    Args:
        command: Program and arguments.
        log: Where standard output and error go.
        environment: Variables beside those of this process.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before their children."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command stands in parentheses and may hold spaces; what follows the last one is plain: see proc(5).
            parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = []
    level = [pid]
    while level:
        level = [child for one in level for child in children.get(one, [])]
        found += level
    return found


def free_port() -> int:
    """A TCP port that nobody listens on now, for programs that take a fixed one only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_line(process: "subprocess.Popen[bytes]", log: Path, start: str) -> str:
    """Wait until a line of `log` begins with `start`; returns what follows on it.

    Raises:
        RuntimeError: The process ended, or did not say so in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(start):
                return line.removeprefix(start).strip()
        time.sleep(_POLL_S)
    raise RuntimeError(f"{process.args!r} did not say {start!r}; {log} ends: {tail(log)}")


def tail(log: Path) -> str:
    """The end of a log, for an error message."""
    return log.read_text(errors="replace")[-2000:]


def cpu_us(pid: int) -> float:
    """Microseconds of processor time that all threads of a process have spent so far, user and system.

    From `schedstat`, which counts nanoseconds; `stat` counts in ticks of 10 ms. A thread that has ended leaves the sum,
    so that this is right for processes that keep their threads.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) / _NS_PER_US
