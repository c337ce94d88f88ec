"""One supervised part: a plan, its life, and the process that it runs in now."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.cli.up.launch_dir import LaunchDir
from twostroke.cli.up.life import PartEvent, PartLife, PartState
from twostroke.cli.up.plan import PartPlan
from twostroke.cli.up.process import PartProcess
from twostroke.ipc.supervise import PartReady
from twostroke.protocol.errors import TwostrokeError

OnChange = Callable[["Part", str], None]
"""Told of each step of a part, with a few words for people."""


class PartFailedError(TwostrokeError):
    """A part ended in a way that another start would not mend."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} ended with {describe_exit(code)}")
        self.name = name
        self.code = code


@dataclass(frozen=True)
class PartCommand:
    """How to start a part.

    Attributes:
        name: `router`, `context-0`, ...
        command: Program and arguments.
        log: Where its output goes.
        environment: Its environment, less what the supervisor adds.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]

    @classmethod
    def of(cls, planned: PartPlan, launch: LaunchDir) -> "PartCommand":
        """`twostroke SUBCOMMAND --config FILE`, run by this interpreter; its temporary files stay in the launch's."""
        config = launch.write_config(planned)
        command = [sys.executable, "-m", "twostroke.cli", planned.command, "--config", str(config)]
        environment = os.environ | {"TMPDIR": str(launch.temporary)}
        return cls(planned.name, command, launch.log_file(planned.name), environment)


class Part:
    """Keeps one process running, from its first start to its last exit.

    Args:
        command: How to start it.
        on_change: Told of each step.
    """

    def __init__(self, command: PartCommand, on_change: OnChange) -> None:
        self.name = command.name
        self.life = PartLife()
        self.ready = asyncio.Event()
        self._command = command
        self._on_change = on_change
        self._process: PartProcess | None = None
        self._ready_since = 0.0
        self._stop = asyncio.Event()

    @property
    def state(self) -> PartState:
        """Where it is in its life."""
        return self.life.state

    @property
    def pid(self) -> int | None:
        """Its process now, if it has one."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Start the process, and start it again when it dies, until `stop`.

        Raises:
            PartFailedError: It ended in a way that another start would not mend.
        """
        while not self._stop.is_set():
            code = await self._run_once()
            step = self.life.after_exit(code)
            self._move(step, describe_exit(code))
            if step is PartEvent.GAVE_UP:
                raise PartFailedError(self.name, code)
            if self.state is PartState.RESTARTING:
                await self._back_off()

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and after `grace_s` make it; it is not started again."""
        self._stop.set()
        if self.state not in {PartState.STOPPED, PartState.FAILED}:
            self._move(PartEvent.STOP, "")
        if self._process is not None:
            await self._process.stop(grace_s)

    def kill(self) -> None:
        """End its processes now."""
        if self._process is not None:
            self._process.kill()

    async def _run_once(self) -> int:
        """One process from start to exit; its exit status."""
        self._move(PartEvent.SPAWNED, "")
        process = await PartProcess.start(self._command.command, self._command.environment, self._command.log)
        self._process = process
        if self._stop.is_set():  # `stop` found no process yet
            process.kill()
        listening = asyncio.create_task(self._listen(process))
        try:
            return await process.wait()
        finally:
            listening.cancel()
            self._process = None
            self._forgive()

    async def _listen(self, process: PartProcess) -> None:
        async for event in process.events():
            if isinstance(event, PartReady):
                self._move(PartEvent.ANSWERED, event.http)
                self._ready_since = time.monotonic()
                self.ready.set()
            else:
                self._move(PartEvent.LOADING, event.text)

    def _forgive(self) -> None:
        if self.ready.is_set():
            self.life.forgive(time.monotonic() - self._ready_since)
        self.ready.clear()

    async def _back_off(self) -> None:
        """Wait until the next start is due, or until `stop`."""
        try:
            await asyncio.wait_for(self._stop.wait(), self.life.delay_s)
        except TimeoutError:
            return

    def _move(self, event: PartEvent, words: str) -> None:
        self.life.move(event)
        self._on_change(self, words)


def describe_exit(code: int) -> str:
    """An exit status in words: `exit status 3`, `signal 9`."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"
