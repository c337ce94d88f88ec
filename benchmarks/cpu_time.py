"""CPU time of a process, as its kernel counts it: all threads, in nanoseconds rather than clock ticks."""

from pathlib import Path

_NS = 1e9


def cpu_s(pid: int) -> float:
    """CPU seconds that the live threads of `pid` have used so far.

    Raises:
        FileNotFoundError: There is no such process.
    """
    spent_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent_ns += int((thread / "schedstat").read_text("ascii").split()[0])
        except (FileNotFoundError, ProcessLookupError):  # it ended in this moment
            continue
    return spent_ns / _NS
