"""`IpcExecutor` and its worker world in a real process (scripted, without an engine): start and service."""

import asyncio
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ipc_worlds import DEADLINE_S, MODULE, Start, is_running, pid_of, submit, until, worlds
from tests.support.scripted_worker import Script, expected_tokens
from tests.support.worker_thread import SECRET
from twostroke.executor.base import HealthState
from twostroke.executor.ipc import IpcExecutor
from twostroke.ipc.drops import DropReason
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors; shut down at the end."""
    with worlds() as begin:
        yield begin


# --- service ---


def test_threads_and_loops_are_served_alike(start: Start) -> None:
    """Waiting, iterating, and awaiting give the same tokens."""
    executor = start()
    expected = expected_tokens([1, 2], 20)
    assert submit(executor, [1, 2], 20).wait(DEADLINE_S).token_ids == expected
    assert len(list(submit(executor, [1, 2], 20))) == 20

    async def read() -> list[list[int]]:
        results = [submit(executor, [1, 2], 20) for _ in range(10)]
        return [(await result.completion()).token_ids for result in results]

    assert asyncio.run(read()) == [expected] * 10
    assert executor.pending == 0
    assert executor.drops.total == 0


def test_load_is_known_whether_or_not_anything_was_submitted(start: Start) -> None:
    """Heartbeats are read from readiness on; draining shows in them."""
    executor = start()
    heard = executor.load
    until(lambda: executor.load is not heard)
    assert executor.load.admitting
    executor.drain()
    until(lambda: not executor.load.admitting)
    assert executor.check_health().state is HealthState.READY


def test_the_dispatch_thread_starts_with_the_first_submit(start: Start) -> None:
    """Not before; and one serves all."""
    executor = start()

    def dispatchers() -> int:
        return sum(thread.name == "dispatch" for thread in threading.enumerate())

    before = dispatchers()
    for _ in range(3):
        submit(executor, [1]).wait(DEADLINE_S)
    assert dispatchers() == before + 1


def test_an_abort_reaches_the_worker(start: Start) -> None:
    """The result ends at once, the worker's sequence soon."""
    executor = start()
    result = submit(executor, [1], 1_000_000)
    until(lambda: executor.load.running == 1)
    result.abort()
    with pytest.raises(AbortedError):
        result.wait(DEADLINE_S)
    until(lambda: executor.load.running == 0)


def test_a_storm_from_many_threads_leaves_nothing_behind(start: Start) -> None:
    """Each result has an end: all its tokens, or `AbortedError`."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    executor = start()
    failures: list[str] = []

    def client(number: int) -> None:
        dice = random.Random(seed + number)
        for _ in range(30):
            prompt, count = [dice.randrange(800)], dice.randrange(1, 20)
            result = submit(executor, prompt, count)
            if dice.random() < 0.4:
                time.sleep(dice.random() * 0.01)
                executor.abort_request(result.key.client_id)
            try:
                made = result.wait(DEADLINE_S).token_ids
            except AbortedError:
                continue
            if made != expected_tokens(prompt, count):
                failures.append(f"{prompt} x {count}: {made}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert executor.pending == 0
    until(lambda: executor.load.running == 0)
    dropped = executor.drops
    assert dropped.total == dropped[DropReason.UNKNOWN_KEY]


# --- the start ---


def test_progress_is_forwarded_and_the_health_says_starting(start: Start) -> None:
    """Submitting has to wait."""
    texts: list[str] = []
    executor = start(Script.LOAD_FOREVER, ready=False, on_progress=texts.append)
    assert executor.check_health().state is HealthState.STARTING
    with pytest.raises(OverloadedError, match="still loading"):
        submit(executor, [1])
    until(lambda: texts == ["pretending to load weights"])


def test_a_worker_killed_while_loading_is_reported_with_rank_pid_and_signal(start: Start) -> None:
    """By pidfd: the load deadline of ten minutes plays no part."""
    loading = threading.Event()
    executor = start(Script.LOAD_FOREVER, ready=False, on_progress=lambda _text: loading.set())
    assert loading.wait(DEADLINE_S)
    identity = executor._launcher.identity
    assert identity is not None
    os.kill(identity.pid, signal.SIGKILL)
    expected = rf"while loading: rank 0 \(pid {identity.pid}\) was killed by signal SIGKILL"
    with pytest.raises(EngineDeadError, match=expected):
        executor.ready.result(DEADLINE_S)
    assert executor.check_health().state is HealthState.DEAD


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (Script.FAIL, r"could not start \(rank 0\): there are no weights in this fake"),
        (Script.DIE_EARLY, r"rank 0 \(pid \d+\) was killed by signal SIGTERM"),
        (Script.DIE_LOADING, r"rank 0 \(pid \d+\) was killed by signal SIGKILL"),
    ],
)
def test_a_start_that_fails_says_why(
    script: Script, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world's own words if it had any; else how it ended. Nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineDeadError, match=problem):
        IpcExecutor.launch(MODULE, Role.CONTEXT, ModelConfig(path=script.value), EngineConfig())
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_ended(start: Start) -> None:
    """The world is gone before the error is raised."""
    executor = start(Script.LOAD_FOREVER, ready=False, load_s=1.5)
    with pytest.raises(EngineDeadError, match=r"was not ready within 1\.5 s") as raised:
        executor.ready.result(DEADLINE_S)
    # Where its start alone takes as long, the world has not told who it is.
    named = re.search(r"\(pid (\d+)\)", str(raised.value))
    assert named is not None
    assert not is_running(int(named[1]))


def test_a_start_can_be_given_up(start: Start) -> None:
    """Shutdown while loading ends the world at once."""
    loading = threading.Event()
    executor = start(Script.LOAD_FOREVER, ready=False, on_progress=lambda _text: loading.set())
    assert loading.wait(DEADLINE_S)
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down while its worker was loading"):
        executor.ready.result(0)


def test_secrets_are_neither_in_the_arguments_nor_in_the_environment(start: Start) -> None:
    """Of the worker's process, where other processes of the user could read them."""
    executor = start()
    process = Path(f"/proc/{pid_of(executor)}")
    visible = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
    for hidden in (SECRET, executor._spec.key, executor._spec.nonce):
        assert hidden not in visible
        assert hidden.hex().encode() not in visible
    assert executor._directory.stat().st_mode & 0o777 == 0o700


def test_a_world_outlives_the_thread_that_asked_for_it(start: Start) -> None:
    """The kernel kills a child with the thread that made it; the world is made by a thread that stays."""
    made: list[IpcExecutor] = []
    starter = threading.Thread(target=lambda: made.append(start()))
    starter.start()
    starter.join()
    time.sleep(0.2)
    assert submit(made[0], [1]).wait(DEADLINE_S).token_ids == expected_tokens([1], 4)
