"""Scripted worker worlds in processes of their own, behind `IpcExecutor`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.scripted_worker import Script, make_request
from tests.support.worker_thread import SECRET
from twostroke.executor.ipc import IpcExecutor
from twostroke.executor.launcher import LaunchOptions
from twostroke.executor.result import GenerationResult
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.worker import Role

MODULE = "tests.support.scripted_worker"
DEADLINE_S = 10.0
Start = Callable[..., IpcExecutor]


@contextmanager
def worlds() -> Iterator[Start]:
    """Gives a function that starts executors; whatever a test leaves running is shut down."""
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

    try:
        yield begin
    finally:
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
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pid_of(executor: IpcExecutor) -> int:
    """Process id of rank 0."""
    assert executor.pid is not None
    return executor.pid
