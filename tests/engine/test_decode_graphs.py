"""Captured decode steps: only static memory, the same logits as without them, at every padded size."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.recording_device import RecordingDevice
from tests.support.tiny_models import save_tiny_model
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.decode_graphs import DecodeGraphs, padded_sizes
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.library_attention import StepForward, forward
from twostroke.engine.model_loader import load_model
from twostroke.engine.packing import PackedStep, pack
from twostroke.protocol.config import ModelConfig
from twostroke.protocol.sampling import SamplingParams

BLOCK_SIZE = 8
MAX_MODEL_LEN = 40
MOST = 3


class Graphs:
    """Graphs of a tiny model, and the model and cache under them."""

    def __init__(self, folder: Path) -> None:
        model = load_model(ModelConfig(path=str(save_tiny_model(folder, head_dim=32))))
        self.cache = torch.randn(16, 2, 2, 2, BLOCK_SIZE, 32, generator=torch.Generator().manual_seed(1))
        self.attention = TritonAttention(self.cache, model.config.num_attention_heads)
        self.forward: StepForward = partial(forward, model.module)
        self.device = RecordingDevice()
        static = [*model.module.parameters(), *model.module.buffers(), self.cache]
        self.graphs = DecodeGraphs(self.device, self.forward, self.attention, static, MOST, MAX_MODEL_LEN, BLOCK_SIZE)

    def plain(self, step: PackedStep) -> torch.Tensor:
        """The logits of a step that is run as usual."""
        return self.forward(step, self.attention.prepare(step.attention))


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """Captured under watch: a step that touches anything but static memory fails here."""
    with torch.inference_mode():
        return Graphs(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (6, [1, 2, 3, 4, 6]), (64, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])]
)
def test_padded_sizes_end_at_the_largest_batch(most: int, sizes: list[int]) -> None:
    """No batch is padded by more than half of it."""
    assert padded_sizes(most) == sizes


@torch.inference_mode()
def test_replays_give_the_logits_of_plain_steps(captured: Graphs) -> None:
    """Batches of one and of two, then of one again, over tables of several blocks; the cache is written alike."""
    lengths = [[17], [9, 26], [40]]
    for positions in lengths:
        step = _decodes(positions)
        assert captured.graphs.fits(step)
        captured.cache[0] = 0.0
        expected = captured.plain(step).clone()
        written = captured.cache.clone()
        captured.cache[step.attention.slots // BLOCK_SIZE, :, :, :, step.attention.slots % BLOCK_SIZE] = 0.0
        logits = captured.graphs.run(step)
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(captured.cache, written)
    assert [step.replays for step in captured.device.captured] == [0, 1, 2]  # sizes 3, 2 and 1


def test_other_steps_do_not_fit(captured: Graphs) -> None:
    """Chunks, short slices of several tokens, unsampled ones, scored ones, and too many sequences."""
    greedy = SamplingParams(temperature=0.0)
    short = SequenceSlice(0, [1, 2], 0, [0], True, greedy, 0)
    chunk = SequenceSlice(0, [1] * 20, 0, [0, 1, 2], True, greedy, 0)
    unsampled = SequenceSlice(0, [1], 0, [0], False, greedy, 0)
    scored = SequenceSlice(0, [1], 0, [0], True, greedy, 0, prompt_targets=[2])
    for part in (short, chunk, unsampled, scored):
        assert not captured.graphs.fits(pack(StepPlan([part]), BLOCK_SIZE))
    assert not captured.graphs.fits(_decodes([5] * (MOST + 1)))
    assert captured.graphs.fits(_decodes([5] * MOST))


def _decodes(lengths: list[int]) -> PackedStep:
    """One decode for each sequence, whose length it is with its new token; tables of scattered blocks."""
    free = torch.randperm(16, generator=torch.Generator().manual_seed(2)).tolist()
    slices = []
    for length in lengths:
        blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        slices.append(SequenceSlice(0, [length + 3], length - 1, blocks, True, SamplingParams(temperature=0.0), 0))
    return pack(StepPlan(slices), BLOCK_SIZE)
