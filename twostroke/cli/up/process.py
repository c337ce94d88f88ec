"""One process of a part: started in a session of its own, heard through a pipe, stopped for certain."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
import structlog

from twostroke.ipc.supervise import PARENT_PID_VARIABLE, READY_FD_VARIABLE, PartEvent, decode_event

logger = structlog.get_logger(__name__)

_DEAD_STATES = ("Z", "X")
_LEFTOVERS_DEADLINE_S = 5.0
_LEFTOVERS_POLL_S = 0.02


class PartProcess:
    """A running process and the pipe on which it announces itself. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, events: asyncio.StreamReader) -> None:
        self._process = process
        self._events = events

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Self:
        """Start `command`, its output appended to `log`.

        Called on the main thread: the kernel ends the process when the thread that started it ends.
        """
        reading, writing = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**environment, READY_FD_VARIABLE: str(writing), PARENT_PID_VARIABLE: str(os.getpid())},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(writing,),
                    start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which stops its parts in order
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return cls(process, await _reader(reading))

    @property
    def pid(self) -> int:
        """Process id, and id of its session."""
        return self._process.pid

    async def events(self) -> AsyncIterator[PartEvent]:
        """What the part announces, until it closes the pipe or ends."""
        while line := await self._events.readline():
            try:
                yield decode_event(line)
            except msgspec.DecodeError as error:
                logger.warning("a part announced something unknown", pid=self.pid, error=str(error))

    async def wait(self) -> int:
        """Its exit status (negative: the signal that ended it), once no process of its session is left."""
        code = await self._process.wait()
        await self._end_session()
        return code

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; after `grace_s` make it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            logger.warning("a part did not end in time and is killed", pid=self.pid, grace_s=grace_s)
            self.kill()
            await self._process.wait()
        await self._end_session()

    def kill(self) -> None:
        """End the process and all that it started now."""
        for pid in session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _end_session(self) -> None:
        """End what the process left behind: its world must have let go of its ports before another start."""
        deadline = time.monotonic() + _LEFTOVERS_DEADLINE_S
        while left := session_members(self.pid):
            if time.monotonic() > deadline:
                logger.warning("processes of a part do not end, though killed", session=self.pid, pids=left)
                return
            self.kill()
            await asyncio.sleep(_LEFTOVERS_POLL_S)


def session_members(session: int) -> list[int]:
    """Ids of the live processes of a session, from `/proc/<pid>/stat` (see proc(5): state, ppid, pgrp, session)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, member_of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended meanwhile
        if int(member_of) == session and state not in _DEAD_STATES:
            members.append(int(stat.parent.name))
    return members


async def _reader(descriptor: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    return reader
