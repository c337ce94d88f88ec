"""How an `IpcExecutor` and its worker world end: by death, by a crash, by shutdown, with their launcher."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ipc_worlds import DEADLINE_S, MODULE, Start, is_running, pid_of, submit, until, worlds
from tests.support.scripted_worker import Act, Script, make_request
from tests.support.worker_thread import SECRET
from twostroke.executor.base import HealthState
from twostroke.executor.remote import RemoteExecutor
from twostroke.executor.result import GenerationResult
from twostroke.ipc.local_client import RequestSender
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.errors import EngineDeadError, OverloadedError
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.responses import SequenceOutput

pytestmark = pytest.mark.cluster


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors; shut down at the end."""
    with worlds() as begin:
        yield begin


# --- death ---


def test_a_killed_worker_fails_everything_pending_with_its_signal(start: Start) -> None:
    """Waiters of both kinds; the executor stays dead."""
    executor = start()
    results = [submit(executor, [Act.HANG]) for _ in range(5)]
    pid = pid_of(executor)
    os.kill(pid, signal.SIGKILL)
    for result in results:
        with pytest.raises(EngineDeadError, match=rf"rank 0 \(pid {pid}\) was killed by signal SIGKILL"):
            result.wait(DEADLINE_S)
    assert "SIGKILL" in str(executor.died.result(DEADLINE_S))
    assert "SIGKILL" in executor.check_health().reason
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        submit(executor, [1])
    executor.abort_request(1)


def test_an_idle_workers_death_is_noticed_without_a_submit(start: Start) -> None:
    """A server whose frontends are all remote has to know."""
    executor = start()
    os.kill(pid_of(executor), signal.SIGKILL)
    assert "SIGKILL" in str(executor.died.result(DEADLINE_S))


def test_results_that_left_a_dying_worker_are_not_lost(start: Start) -> None:
    """It finishes one request and kills itself: that one is whole, the other fails."""
    executor = start()
    hanging, finished = submit(executor, [Act.HANG]), submit(executor, [Act.FINISH_AND_KILL_ITSELF], 200)
    assert len(finished.wait(DEADLINE_S).token_ids) == 200
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        hanging.wait(DEADLINE_S)


async def test_an_attached_frontend_notices_the_death_too_and_keeps_what_it_got(start: Start) -> None:
    """The connection's end is an event; heartbeats need not run out first."""
    executor = start()
    remote = await RemoteExecutor.attach(executor.description.address, SECRET, ClientIds(7))
    hanging = remote.submit(make_request(SequenceKey(remote.draw_client_id()), [Act.HANG]))
    last = remote.submit(make_request(SequenceKey(remote.draw_client_id()), [Act.FINISH_AND_KILL_ITSELF], 200))
    async with asyncio.timeout(DEADLINE_S):
        assert len((await last.completion()).token_ids) == 200
        with pytest.raises(EngineDeadError, match="connection was lost"):
            await hanging.completion()


def test_a_stopped_process_is_dead_by_silence_and_gets_killed(start: Start) -> None:
    """SIGSTOP: alive for the kernel, silent for everyone else."""
    executor = start(dead_after_s=1.0)
    pid = pid_of(executor)
    result = submit(executor, [Act.FREEZE])
    with pytest.raises(EngineDeadError, match="was silent for"):
        result.wait(DEADLINE_S)
    until(lambda: not is_running(pid))


def test_a_worker_that_stops_by_itself_fails_what_is_pending_with_its_reason(start: Start) -> None:
    """And its process is collected."""
    executor = start()
    pid = pid_of(executor)
    hanging = submit(executor, [Act.HANG])
    submit(executor, [Act.STOP])
    with pytest.raises(EngineDeadError, match="was told to stop"):
        hanging.wait(DEADLINE_S)
    until(lambda: not is_running(pid))


def test_a_crash_of_the_response_thread_is_fatal_and_it_is_not_restarted(start: Start) -> None:
    """A bug in a sink: everything pending fails, the world ends."""

    class Broken(GenerationResult):
        def feed(self, output: SequenceOutput) -> None:
            raise ZeroDivisionError(str(output.offset))

    executor = start()
    hanging = submit(executor, [Act.HANG])
    request = make_request(SequenceKey(executor.draw_client_id()), [1])
    executor.submit_to(request, Broken(request, lambda: None))
    with pytest.raises(EngineDeadError, match="response thread crashed: ZeroDivisionError"):
        hanging.wait(DEADLINE_S)
    with pytest.raises(EngineDeadError, match="response thread crashed"):
        submit(executor, [1])
    until(lambda: not is_running(pid_of(executor)))


def test_a_crash_of_the_dispatch_thread_is_fatal_and_it_is_not_restarted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything pending fails; a later submit raises instead of starting a new thread."""

    def broken(_self: RequestSender, _payload: bytes, _timeout_s: float) -> bool:
        raise ZeroDivisionError

    executor = start()
    hanging = submit(executor, [Act.HANG])
    monkeypatch.setattr(RequestSender, "send", broken)
    submit(executor, [1])
    with pytest.raises(EngineDeadError, match="dispatch thread crashed: ZeroDivisionError"):
        hanging.wait(DEADLINE_S)
    with pytest.raises(EngineDeadError, match="dispatch thread crashed"):
        submit(executor, [1])


def test_a_full_queue_refuses_requests(start: Start) -> None:
    """The worker does not read; nothing blocks, refused requests leave no entry."""
    executor = start(limits=QueueLimits(messages=16), dead_after_s=600.0)
    os.kill(pid_of(executor), signal.SIGSTOP)
    padding = [Act.HANG, *[1] * 200_000]
    accepted = refused_in_a_row = 0
    ends_at = time.monotonic() + DEADLINE_S
    # A refusal is not the last word: the dispatch thread still moves what waits into the socket's own queue.
    while refused_in_a_row < 10:
        assert time.monotonic() < ends_at
        try:
            submit(executor, padding)
        except OverloadedError:
            refused_in_a_row += 1
            time.sleep(0.05)
        else:
            refused_in_a_row = 0
            accepted += 1
    with pytest.raises(OverloadedError, match="try again later"):
        submit(executor, padding)
    assert executor.pending == accepted
    assert executor.check_health().state is HealthState.READY


# --- the end ---


def test_shutdown_ends_the_world_in_order_and_leaves_nothing(start: Start) -> None:
    """Pending results fail, the process exits by itself, directory and descriptors are gone; twice is no harm."""
    start().shutdown()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths
    executor = start()
    pid, directory = pid_of(executor), executor._directory
    hanging = submit(executor, [Act.HANG])
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        hanging.wait(DEADLINE_S)
    assert executor._process is not None
    assert executor._process.exit_code == 0
    assert not is_running(pid)
    assert not directory.exists()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - numbers, not paths
    assert executor.died.done()


def test_a_world_that_ignores_the_shutdown_is_killed_at_the_deadline(start: Start) -> None:
    """Never a hang."""
    executor = start(Script.IGNORE_SHUTDOWN)
    pid, directory = pid_of(executor), executor._directory
    executor.shutdown(0.5)
    assert not is_running(pid)
    assert not directory.exists()
    assert executor._process is not None
    assert executor._process.exit_code == -signal.SIGKILL


def test_a_stopped_world_is_killed_at_the_deadline(start: Start) -> None:
    """It cannot even read the shutdown message."""
    executor = start()
    pid = pid_of(executor)
    os.kill(pid, signal.SIGSTOP)
    executor.shutdown(0.5)
    assert not is_running(pid)


def test_a_shutdown_on_the_thread_that_it_waits_for_is_refused(start: Start) -> None:
    """A callback of `died` runs there; it would wait for itself."""
    executor = start()
    raised: list[RuntimeError] = []

    def end(_died: object) -> None:
        try:
            executor.shutdown()
        except RuntimeError as error:
            raised.append(error)

    executor.died.add_done_callback(end)
    os.kill(pid_of(executor), signal.SIGKILL)
    until(lambda: len(raised) == 1)


LAUNCHER = f"""
import sys
from twostroke.executor.ipc import IpcExecutor
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.worker import Role
executor = IpcExecutor.launch({MODULE!r}, Role.CONTEXT, ModelConfig(path="normal"), EngineConfig())
assert not {{"torch", "triton", "transformers", "ucxx"}} & set(sys.modules)
print("pid", executor.pid, executor._directory, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("by_kill", [True, False], ids=["killed", "exits"])
def test_a_worker_dies_with_its_launcher(by_kill: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """By `kill -9`, or at the end of a program that forgot `shutdown`; the latter also cleans up."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        line = next(line for line in launcher.stdout if line.startswith("pid "))
        _, pid, directory = line.split()
        assert is_running(int(pid))
        if by_kill:
            launcher.kill()
        launcher.stdin.close()
        assert launcher.wait(DEADLINE_S) == (-signal.SIGKILL if by_kill else 0)
        until(lambda: not is_running(int(pid)))
        assert Path(directory).exists() == by_kill
    if by_kill:
        for socket in Path(directory).iterdir():
            socket.unlink()
        Path(directory).rmdir()
