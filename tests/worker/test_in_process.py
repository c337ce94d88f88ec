"""The in-process form over an instant runner: the same promises as every executor."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.interfaces import StepPlan, StepResult
from twostroke.executor.base import HealthState
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import AbortedError, EngineDeadError, InvalidRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.worker.in_process import InProcessExecutor

PROMPT = (11, 12, 13, 14, 15)


class GatedRunner(FakeRunner):
    """A fake runner that takes each step only when the test lets it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        """Tell the test, then wait for it."""
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        return super().run(plan)


@pytest.fixture
def executor() -> Iterator[InProcessExecutor]:
    """An executor that is shut down in the end."""
    executor = InProcessExecutor(FakeRunner(), ModelConfig(path="/models/fake"), EngineConfig())
    yield executor
    executor.shutdown(5.0)


def make_request(
    executor: InProcessExecutor, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6
) -> GenerationRequest:
    """A greedy request with a fresh client id."""
    return GenerationRequest(
        key=SequenceKey(executor.draw_client_id()),
        prompt_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def test_it_describes_its_model(executor: InProcessExecutor) -> None:
    """The name is the folder's, the limits are the runner's."""
    assert executor.model.name == "fake"
    assert (executor.model.max_model_len, executor.model.vocab_size) == (256, 1000)
    assert executor.description.num_blocks == 64
    assert executor.description.address == ""


def test_generate_blocks_until_the_end(executor: InProcessExecutor) -> None:
    """The whole output and why it ended."""
    completion = executor.generate(make_request(executor), timeout_s=10)
    assert completion.token_ids == expected_output(PROMPT, 6, 1000)
    assert completion.finish_reason is FinishReason.LENGTH


async def test_generate_async_streams(executor: InProcessExecutor) -> None:
    """Awaiting readers get every token, in order."""
    request = make_request(executor)
    offsets = [output.offset async for output in executor.generate_async(request)]
    assert offsets == list(range(6))


async def test_many_streams_at_once(executor: InProcessExecutor) -> None:
    """Streams that run together give what each gives alone."""
    prompts = [(first, first + 1, first + 2) for first in range(1, 21)]
    results = [executor.submit(make_request(executor, prompt)) for prompt in prompts]
    completions = await asyncio.gather(*(result.completion() for result in results))
    assert [one.token_ids for one in completions] == [expected_output(prompt, 6, 1000) for prompt in prompts]


def test_a_request_error_ends_one_request(executor: InProcessExecutor) -> None:
    """A prompt with a token outside the vocabulary fails by itself; the executor goes on."""
    with pytest.raises(InvalidRequestError) as caught:
        executor.generate(make_request(executor, (5000,)), timeout_s=10)
    assert caught.value.param == "prompt"
    assert executor.check_health().state is HealthState.READY
    assert len(executor.generate(make_request(executor), timeout_s=10).token_ids) == 6


def test_a_registered_key_is_refused(executor: InProcessExecutor) -> None:
    """Two pending sequences never share a key."""
    runner = GatedRunner()
    executor = InProcessExecutor(runner, ModelConfig(path="fake"), EngineConfig())
    request = make_request(executor)
    executor.submit(request)
    with pytest.raises(ValueError, match="pending already"):
        executor.submit(request)
    runner.gate.release(100)
    executor.shutdown(5.0)


def test_an_abort_ends_the_result_at_once_and_frees_its_blocks() -> None:
    """The caller hears of it while the step still runs; the engine drops the sequence after it."""
    runner = GatedRunner()
    executor = InProcessExecutor(runner, ModelConfig(path="fake"), EngineConfig())
    result = executor.submit(make_request(executor, max_tokens=100))
    assert runner.entered.acquire(timeout=10)
    result.abort()
    with pytest.raises(AbortedError):
        result.wait(10)
    runner.gate.release(1000)
    executor.generate(make_request(executor), timeout_s=10)
    blocks = executor.worker_load.blocks
    assert blocks.active == 0
    assert blocks.total == 64
    executor.shutdown(5.0)


def test_a_crash_of_the_engine_fails_everything() -> None:
    """What is pending fails with the reason; later submits raise it; the thread is not started again."""
    runner = FakeRunner(error=RuntimeError("out of memory"))
    executor = InProcessExecutor(runner, ModelConfig(path="fake"), EngineConfig())
    result = executor.submit(make_request(executor))
    with pytest.raises(EngineDeadError, match="out of memory"):
        result.wait(10)
    assert executor.check_health().state is HealthState.DEAD
    with pytest.raises(EngineDeadError, match="out of memory"):
        executor.submit(make_request(executor))
    executor.shutdown(5.0)


def test_shutdown_fails_what_is_pending_and_may_be_repeated() -> None:
    """Waiters are released with `EngineDeadError`; the second call returns at once."""
    runner = GatedRunner()
    executor = InProcessExecutor(runner, ModelConfig(path="fake"), EngineConfig())
    result = executor.submit(make_request(executor))
    assert runner.entered.acquire(timeout=10)
    runner.gate.release(100)
    executor.shutdown(5.0)
    with pytest.raises(EngineDeadError, match="shut down"):
        result.wait(1)
    executor.shutdown(5.0)
    with pytest.raises(EngineDeadError):
        executor.submit(make_request(executor))


def test_shutdown_without_any_request(executor: InProcessExecutor) -> None:
    """The engine thread starts with the first submit, so there may be none to end."""
    executor.shutdown(1.0)
    assert executor.check_health().state is HealthState.DEAD
