"""Watching a peer's process on this host: its exit proves that it writes no more, even into shared memory.

A pidfd names one process for good: if the pid was already reused when it is opened, the watch merely lasts too long,
which keeps blocks in quarantine and is safe. A pid that nobody has is an exit that was missed.
"""

import os
import select
from pathlib import Path

from twostroke.protocol.transfer import ProcessName


def this_process() -> ProcessName:
    """This process; its host is this boot's and this pid namespace's, where pids mean the same."""
    return ProcessName(f"{_boot()}:{Path('/proc/self/ns/pid').stat().st_ino}", os.getpid())


def is_elsewhere(process: ProcessName) -> bool:
    """Whether it is surely not on this host, whatever its pid namespace; an unknown host may be this one."""
    return bool(process.host) and process.host.partition(":")[0] != _boot()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


class ProcessWatch:
    """A pidfd, or None for a process that was gone before. Pollable by `fd`."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self._poll = select.poll()
        if fd is not None:
            self._poll.register(fd, select.POLLIN)

    def exited(self) -> bool:
        """Whether the process is gone; never waits."""
        return self.fd is None or bool(self._poll.poll(0))

    def close(self) -> None:
        """Stop watching."""
        if self.fd is not None:
            os.close(self.fd)


def watch_process(process: ProcessName) -> ProcessWatch | None:
    """A watch on `process`; None if it is not where this process can see it.

    Raises:
        OSError: It cannot be watched, for want of file descriptors, say.
    """
    if process.pid <= 0 or process.host != this_process().host:
        return None
    try:
        return ProcessWatch(os.pidfd_open(process.pid))
    except ProcessLookupError:
        return ProcessWatch(None)
