"""Processes of a test: who descends from whom, read from /proc."""

import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[int]:
    """Pids of the direct children of `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command stands in parentheses and may hold spaces; what follows the last one is plain.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid`."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def command_line(pid: int) -> str:
    """The command of a process, its arguments separated by spaces; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll `condition`.

    Raises:
        TimeoutError: It did not hold within the deadline; `what` says what was waited for.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(0.02)
