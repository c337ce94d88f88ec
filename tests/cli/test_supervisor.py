"""The supervisor with stand-ins for servers: start order, restarts, and that nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.cli.up.life import PartState
from twostroke.cli.up.part import Part, PartCommand, PartFailedError
from twostroke.cli.up.supervisor import StartTimeoutError, Supervisor

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 15.0
START_S = 6.0
"""Within it a stand-in becomes ready even on a busy machine; a test waits for its end."""


class Launch:
    """Parts made of stand-ins, and what they went through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[tuple[str, PartState, str]] = []

    def part(self, name: str, mode: str, *arguments: str) -> Part:
        """A part that behaves as `tests.support.fake_part` says for `mode`."""
        command = [sys.executable, "-m", "tests.support.fake_part", mode, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return Part(PartCommand(name, command, self.folder / f"{name}.log", environment), self._note)

    def states_of(self, name: str) -> list[PartState]:
        """The states that a part went through."""
        return [state for part, state, _ in self.steps if part == name]

    def _note(self, part: Part, words: str) -> None:
        self.steps.append((part.name, part.state, words))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A launch whose logs lie in a folder of the test."""
    return Launch(tmp_path)


async def answers() -> None:
    """A cluster that answers at once."""


def ask_to_stop() -> None:
    """What Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def alive(pid: int) -> bool:
    """Whether a process with this id exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  (the condition is about processes, which set no event)
            await asyncio.sleep(0.02)


async def test_servers_are_ready_before_the_router_starts_and_all_stop_when_asked(launch: Launch) -> None:
    """One launch from start to stop, with an interrupt as soon as it is ready."""
    servers = [launch.part("context-0", "ready"), launch.part("generation-0", "ready")]
    router = launch.part("router", "ready")
    pids: list[int | None] = []

    def on_ready() -> None:
        pids.extend(part.pid for part in (*servers, router))
        ask_to_stop()

    await Supervisor(servers, router, answers, DEADLINE_S).run(on_ready)
    expected = [PartState.STARTING, PartState.LOADING, PartState.READY, PartState.STOPPING, PartState.STOPPED]
    assert all(launch.states_of(part.name) == expected for part in (*servers, router))
    order = [(name, state) for name, state, _ in launch.steps]
    router_starts = order.index(("router", PartState.STARTING))
    assert all(order.index((part.name, PartState.READY)) < router_starts for part in servers)
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids if pid)


async def test_a_killed_server_is_started_again(launch: Launch) -> None:
    """And the others run on."""
    server, router = launch.part("context-0", "ready"), launch.part("router", "ready")
    running = asyncio.create_task(Supervisor([server], router, answers, DEADLINE_S).run(lambda: None))
    await until(lambda: router.state is PartState.READY)
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: launch.states_of("context-0").count(PartState.READY) == 2)
    assert server.pid != first
    assert ("context-0", PartState.RESTARTING, "signal 9") in launch.steps
    assert launch.states_of("router")[-1] is PartState.READY
    ask_to_stop()
    await running


async def test_a_part_that_crashes_twice_at_its_start_gets_a_third_try(launch: Launch, tmp_path: Path) -> None:
    """With a back-off between."""
    crashes = tmp_path / "crashes"
    crashes.write_text("first\nsecond\n")
    server = launch.part("context-0", "flaky", str(crashes))
    await Supervisor([server], launch.part("router", "ready"), answers, DEADLINE_S).run(ask_to_stop)
    assert launch.states_of("context-0").count(PartState.RESTARTING) == 2


async def test_wrong_settings_end_the_launch_with_the_part_named(launch: Launch) -> None:
    """The other parts are stopped, and the message is in the log."""
    good, bad = launch.part("generation-0", "ready"), launch.part("context-0", "wrong-config")
    with pytest.raises(PartFailedError, match="context-0 ended with exit status 2"):
        await Supervisor([good, bad], launch.part("router", "ready"), answers, DEADLINE_S).run(ask_to_stop)
    assert launch.states_of("context-0")[-1] is PartState.FAILED
    assert launch.states_of("generation-0")[-1] is PartState.STOPPED
    assert launch.states_of("router") == [PartState.STOPPED]
    assert "context.port: Expected `int`" in (launch.folder / "context-0.log").read_text()


async def test_a_start_that_takes_too_long_names_who_is_late(launch: Launch) -> None:
    """Every wait has a deadline."""
    servers = [launch.part("context-0", "ready"), launch.part("generation-0", "silent")]
    with pytest.raises(StartTimeoutError, match=r"still waiting for generation-0, router$"):
        await Supervisor(servers, launch.part("router", "ready"), answers, START_S).run(ask_to_stop)


async def test_a_part_that_ignores_the_request_to_end_is_killed(launch: Launch) -> None:
    """After the grace period."""
    stubborn = launch.part("context-0", "stubborn")
    supervisor = Supervisor([stubborn], launch.part("router", "ready"), answers, DEADLINE_S, stop_grace_s=0.3)
    await supervisor.run(ask_to_stop)
    assert launch.steps[-1] == ("context-0", PartState.STOPPED, "signal 9")


async def test_children_of_a_part_end_with_it(launch: Launch) -> None:
    """A worker that outlives its server would keep ports and memory."""
    server = launch.part("context-0", "parent")
    await Supervisor([server], launch.part("router", "ready"), answers, DEADLINE_S).run(ask_to_stop)
    child = next(int(words) for _, state, words in launch.steps if state is PartState.LOADING and words.isdecimal())
    assert not alive(child)


def test_parts_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """No cleanup code runs then: the kernel does it."""
    script = (
        "import asyncio, sys, pathlib\n"
        "from tests.cli.test_supervisor import Launch\n"
        "async def main():\n"
        "    part = Launch(pathlib.Path(sys.argv[1])).part('context-0', 'ready')\n"
        "    running = asyncio.create_task(part.run())\n"
        "    await part.ready.wait()\n"
        "    print(part.pid, flush=True)\n"
        "    await running\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as supervisor:
        assert supervisor.stdout is not None
        part = int(supervisor.stdout.readline())
        assert alive(part)
        supervisor.kill()
    deadline = time.monotonic() + DEADLINE_S
    while alive(part) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(part)
