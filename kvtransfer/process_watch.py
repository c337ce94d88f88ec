"""Watching a peer's process on this host: its exit proves that it writes no more, even into shared memory.

A pidfd names one process for good: if the pid was already reused when it is opened, the watch merely lasts too long,
which keeps blocks in quarantine and is safe.
"""

import os
import select
from pathlib import Path


def host_name() -> str:
    """Names this host's boot and this process's pid namespace: where pids mean the same."""
    return f"{_boot()}:{Path('/proc/self/ns/pid').stat().st_ino}"


def is_elsewhere(host: str) -> bool:
    """Whether the host that calls itself `host` is surely not this one, whatever its pid namespace; "" names none."""
    return bool(host) and host.partition(":")[0] != _boot()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


class ProcessWatch:
    """A pidfd. Pollable by `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def exited(self) -> bool:
        """Whether the process is gone; never waits."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)


def watch_process(host: str, pid: int) -> ProcessWatch | None:
    """A watch on process `pid` of `host`; None if that is elsewhere, or gone before it could be named."""
    if pid <= 0 or host != host_name():
        return None
    try:
        return ProcessWatch(os.pidfd_open(pid))
    except OSError:
        return None
