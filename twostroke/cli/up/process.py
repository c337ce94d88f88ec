"""One process of a part: started in a group of its own, heard through a pipe, stopped for certain."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
import structlog

from twostroke.ipc.supervise import PARENT_PID_VARIABLE, READY_FD_VARIABLE, PartEvent, decode_event

logger = structlog.get_logger(__name__)


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
        """Process id, and id of its group."""
        return self._process.pid

    async def events(self) -> AsyncIterator[PartEvent]:
        """What the part announces, until it closes the pipe or ends."""
        while line := await self._events.readline():
            try:
                yield decode_event(line)
            except msgspec.DecodeError as error:
                logger.warning("a part announced something unknown", pid=self.pid, error=str(error))

    async def wait(self) -> int:
        """Its exit status (negative: the signal that ended it), once no process of its group is left."""
        code = await self._process.wait()
        self.kill()
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

    def kill(self) -> None:
        """End its whole group now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    return reader
