"""`IpcExecutor` and its worker world in a real process (scripted, without an engine): start, service, death, end."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.scripted_worker import Act, Script, expected_tokens, make_request
from tests.support.worker_thread import SECRET
from twostroke.executor.base import HealthState
from twostroke.executor.ipc import IpcExecutor
from twostroke.executor.launcher import LaunchOptions
from twostroke.executor.remote import RemoteExecutor
from twostroke.executor.result import GenerationResult
from twostroke.ipc.drops import DropReason
from twostroke.ipc.local_client import RequestSender
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster

MODULE = "tests.support.scripted_worker"
DEADLINE_S = 10.0
Start = Callable[..., IpcExecutor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors and shuts down whatever a test leaves."""
    started: list[IpcExecutor] = []

    def begin(script: Script = Script.NORMAL, *, ready: bool = True, **options: object) -> IpcExecutor:
        on_progress = options.pop("on_progress", lambda _text: None)
        executor = IpcExecutor.start(
            MODULE,
            Role.AGGREGATED,
            ModelConfig(path=script.value),
            EngineConfig(shutdown_s=5.0),
            secret=SECRET,
            on_progress=on_progress,  # type: ignore[arg-type]  # a callback, as the tests say
            options=LaunchOptions(**options),  # type: ignore[arg-type]  # likewise
        )
        started.append(executor)
        if ready:
            executor.ready.result(DEADLINE_S)
        return executor

    yield begin
    for executor in started:
        executor.shutdown(1.0)


def submit(executor: IpcExecutor, prompt: list[int], max_tokens: int = 4) -> GenerationResult:
    """Submit a plain request."""
    return executor.submit(make_request(SequenceKey(executor.draw_client_id()), prompt, max_tokens))


def until(met: Callable[[], bool]) -> None:
    """Wait until `met`; fails after the deadline."""
    ends_at = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pid_of(executor: IpcExecutor) -> int:
    """Process id of rank 0."""
    assert executor.pid is not None
    return executor.pid


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
    with pytest.raises(EngineDeadError, match=r"was not ready within 1\.5 s"):
        executor.ready.result(DEADLINE_S)
    identity = executor._launcher.identity
    assert identity is not None
    assert not is_running(identity.pid)


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
    accepted = 0
    for _ in range(10_000):
        try:
            submit(executor, padding)
        except OverloadedError:
            break
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
