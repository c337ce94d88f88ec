"""The GPU's runner, whole, on a device that is not there: its kernels under the interpreter, its graphs under watch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tests.support.recording_device import RecordingDevice
from tests.support.tiny_models import save_tiny_model
from twostroke.engine.gpu_runner import GpuRunner, largest_step
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.model_facts import cache_geometry
from twostroke.engine.model_loader import load_model
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.samplers import sampler_for
from twostroke.protocol.config import KVCacheConfig, ModelConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.sampling import SamplingParams

BLOCK_SIZE = 8
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 32 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads the kernels take."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=48)


def test_steps_give_the_tokens_of_the_cpu(folder: Path) -> None:
    """Two prompts in chunks, then decodes by replay: the tokens, and near logprobs, of the runner on the CPU."""
    device = RecordingDevice(free_bytes=2 * 10 * BLOCK_BYTES + 1000, peak_bytes=1000)
    kv = KVCacheConfig(block_size=BLOCK_SIZE, memory_fraction=0.5)
    on_gpu = GpuRunner.load(ModelConfig(path=str(folder)), kv, 24, 2, device, lambda _: None)
    assert on_gpu.cache.num_blocks == 10
    assert on_gpu.cache.gpu is device
    assert len(device.captured) == 2
    kv = KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=10)
    on_cpu = ModelRunner.load(ModelConfig(path=str(folder)), kv, 24, 2, 1, lambda _: None)
    made: list[list[int]] = [[], []]
    for plan in _plans(made):
        ours, expected = on_gpu.run(plan).tokens, on_cpu.run(plan).tokens
        assert [token.token_id for token in ours] == [token.token_id for token in expected]
        for token, other in zip(ours, expected, strict=True):
            made[token.request_id].append(token.token_id)
            assert token.logprobs is not None
            assert other.logprobs is not None
            assert token.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
    assert [step.replays for step in device.captured] == [2, 1]


def test_a_model_that_cannot_be_captured_is_served_without_graphs(folder: Path) -> None:
    """Its layers ask for a value on the host: a warning, and no graphs."""
    model = load_model(ModelConfig(path=str(folder)))
    model.module.register_forward_pre_hook(_look_at_weights)
    runner = GpuRunner(model, KVCache(cache_geometry(model, BLOCK_SIZE), 8), sampler_for(torch.device("cpu")))
    with capture_logs() as logs:
        runner.capture(RecordingDevice(), 2)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "needs the host" in logs[0]["reason"]
    part = SequenceSlice(0, [3], 0, [0], True, SamplingParams(temperature=0.0), 0)
    assert len(runner.run(StepPlan([part])).tokens) == 1


def test_a_gpu_without_room_is_refused(folder: Path) -> None:
    """Before anything else is made."""
    device = RecordingDevice(free_bytes=BLOCK_BYTES, peak_bytes=1000)
    kv = KVCacheConfig(block_size=BLOCK_SIZE)
    with pytest.raises(ConfigError, match=r"kv_cache.memory_fraction: 0\.85 of 7192 bytes"):
        GpuRunner.load(ModelConfig(path=str(folder)), kv, 4, 2, device, lambda _: None)
    assert not device.captured


def test_the_largest_step_uses_the_whole_budget() -> None:
    """All sequences, all tokens, no chunk beyond the model's length."""
    for budget, sequences in ((100, 4), (3, 8), (1, 1)):
        plan = largest_step(budget, sequences, 48, BLOCK_SIZE)
        assert plan.tokens == budget
        assert max(len(part.token_ids) for part in plan.slices) <= 48
        assert len(plan.slices) >= min(budget, sequences)


def _look_at_weights(module: torch.nn.Module, _arguments: object) -> None:
    assert next(module.parameters()).sum().item() != 0.0


def _plans(made: list[list[int]]) -> Iterator[StepPlan]:
    """A chunk of each prompt, the rest of both, two steps of two decodes, and one of one; takes the tokens `made`."""
    prompts = [[(7 + 31 * at + 17 * row) % 250 for at in range(length)] for row, length in enumerate((12, 19))]
    tables = [[4, 9, 2, 7], [0, 3, 8, 1]]
    params = [SamplingParams(temperature=0.0, logprobs=1), SamplingParams(seed=5, top_p=0.9, logprobs=0)]

    def part(row: int, start: int, end: int) -> SequenceSlice:
        tokens = prompts[row] + made[row]
        sample = end == len(tokens)
        return SequenceSlice(row, tokens[start:end], start, tables[row], sample, params[row], len(made[row]))

    yield StepPlan([part(0, 0, 5), part(1, 0, 10)])
    yield StepPlan([part(0, 5, 12), part(1, 10, 19)])
    yield StepPlan([part(0, 12, 13), part(1, 19, 20)])
    yield StepPlan([part(0, 13, 14), part(1, 20, 21)])
    yield StepPlan([part(1, 21, 22)])
