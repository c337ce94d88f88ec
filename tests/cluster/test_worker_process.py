"""A worker process behind `IpcExecutor`: start, service, failure and end, over an instant runner."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_runner import expected_output
from tests.support.processes import alive, wait_until
from twostroke.executor.ipc import IpcExecutor
from twostroke.protocol.config import EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.errors import ConfigError, EngineDeadError, InvalidRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster

MODULE = "tests.support.fake_worker"
VOCAB_SIZE = 1000
WAIT_S = 10.0
ENGINE = EngineConfig(kv_cache=KVCacheConfig(block_size=4, num_blocks=64), shutdown_s=5.0)

Launch = Callable[..., IpcExecutor]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Launches fake workers; all are shut down in the end."""
    executors: list[IpcExecutor] = []

    def start(path: str = "", engine: EngineConfig = ENGINE, secret: bytes | None = None) -> IpcExecutor:
        executor = IpcExecutor.launch(MODULE, Role.AGGREGATED, ModelConfig(path=path), engine, secret=secret)
        executors.append(executor)
        return executor

    yield start
    for executor in executors:
        executor.shutdown(5.0)


def make_request(executor: IpcExecutor, prompt: tuple[int, ...], max_tokens: int = 6) -> GenerationRequest:
    """A greedy request with a fresh client id."""
    return GenerationRequest(
        key=SequenceKey(executor.draw_client_id()),
        prompt_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def test_a_worker_serves_and_reports_its_load(launch: Launch) -> None:
    """Tokens arrive, request errors stay with their request, heartbeats carry the counters, and it ends with 0."""
    executor = launch()
    completion = executor.generate(make_request(executor, (5, 6, 7)), timeout_s=10)
    assert completion.token_ids == expected_output((5, 6, 7), 6, VOCAB_SIZE)
    with pytest.raises(InvalidRequestError):
        executor.generate(make_request(executor, (5, VOCAB_SIZE)), timeout_s=10)
    wait_until(lambda: executor.load.counters.output_tokens == 6, WAIT_S, "the heartbeat tells of six tokens")
    assert executor.load.counters.prompt_tokens == 3
    assert executor.load.blocks.total == 64
    process = executor._process
    assert process is not None
    executor.shutdown(5.0)
    assert process.exit_code == 0


def test_a_broken_model_is_reported_in_one_sentence(launch: Launch) -> None:
    """The launcher raises what the worker said, as a configuration error."""
    with pytest.raises(ConfigError, match="broken is told to be broken"):
        launch("broken")


def test_a_port_in_use_is_reported(launch: Launch) -> None:
    """A worker whose TCP address is taken says so through the local queue."""
    first = launch(secret=bytes(32))
    taken = first.description.address
    engine = EngineConfig(worker_bind=taken)
    with pytest.raises(ConfigError, match="cannot bind"):
        launch(engine=engine, secret=bytes(32))


def test_a_crash_is_told_and_ends_the_process(launch: Launch) -> None:
    """Everything pending fails with the reason, and the exit code is 1."""
    executor = launch("crash=9")
    with pytest.raises(EngineDeadError, match="told to crash"):
        executor.generate(make_request(executor, (9, 9)), timeout_s=10)
    process = executor._process
    assert process is not None
    executor.shutdown(5.0)
    assert process.exit_code == 1


def test_a_killed_worker_is_noticed(launch: Launch) -> None:
    """`kill -9` in the middle of a request fails it with the signal's name."""
    executor = launch("slow=0.05")
    result = executor.submit(make_request(executor, (5,), max_tokens=200))
    next(iter(result))
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        result.wait(10)


def test_sigterm_lets_requests_finish(launch: Launch) -> None:
    """A terminated worker answers what it runs, refuses nothing that it had, and then says that it stopped."""
    executor = launch("slow=0.02")
    result = executor.submit(make_request(executor, (5, 6), max_tokens=30))
    next(iter(result))
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGTERM)
    assert len(result.wait(10).token_ids) == 29
    assert "was shut down" in str(executor.died.result(10)) or "code 0" in str(executor.died.result(10))


def test_heartbeats_go_on_while_a_step_hangs(launch: Launch) -> None:
    """The I/O thread beats during a long step, and the age of the step grows."""
    executor = launch("slow=1.5")
    executor.submit(make_request(executor, (5,), max_tokens=2))
    wait_until(lambda: executor.step_age_s > 0.7, WAIT_S, "the heartbeat tells of a long step")
    assert executor.silence_s < 1.0


def test_an_aborted_request_frees_its_blocks(launch: Launch) -> None:
    """Seen from outside: after an abort all blocks are free or cached again."""
    executor = launch("slow=0.02")
    result = executor.submit(make_request(executor, (5, 6, 7, 8, 9), max_tokens=200))
    next(iter(result))
    wait_until(lambda: executor.load.blocks.active > 0, WAIT_S, "blocks are active")
    result.abort()
    wait_until(lambda: executor.load.blocks.active == 0, WAIT_S, "no block is active")
    assert executor.load.running == 0
    assert executor.load.blocks.total == 64


def test_a_worker_is_not_started_by_hand() -> None:
    """Without a launcher it says what to do instead, and exits with 2."""
    ended = subprocess.run(
        [sys.executable, "-m", "twostroke.worker"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert "started by its server" in ended.stderr


def test_a_worker_dies_with_its_launcher(tmp_path: Path) -> None:
    """However the launcher ends: the kernel ends the worker."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import os, signal\n"
        "from twostroke.executor.ipc import IpcExecutor\n"
        "from twostroke.protocol.config import EngineConfig, ModelConfig\n"
        "from twostroke.protocol.worker import Role\n"
        f"executor = IpcExecutor.launch({MODULE!r}, Role.AGGREGATED, ModelConfig(), EngineConfig())\n"
        "print(executor.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    pid = int(ended.stdout.split()[-1])
    wait_until(lambda: not alive(pid), WAIT_S, "the worker is gone")
