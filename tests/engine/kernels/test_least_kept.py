"""The smallest logit that the filters keep: exactly top-k's and min-p's, and top-p's up to the rounding of sums."""

import random

import pytest
import torch

from tests.support.kernel_device import KERNEL_DEVICE
from twostroke.engine.kernels import least_kept
from twostroke.engine.kernels.least_kept import find_least
from twostroke.engine.triton_sampling import make_filters
from twostroke.protocol.sampling import SamplingParams

ROUNDING = 1e-5
"""Of sums of up to 256 thousand probabilities in float32."""


@pytest.mark.parametrize(("vocabulary", "tile", "lanes"), [(100, 4096, 1024), (1003, 512, 256)])
def test_filters_keep_what_the_definitions_say(
    vocabulary: int, tile: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six rows of any mixture, with ties, zeros of both signs and forbidden tokens, over one tile and several."""
    monkeypatch.setattr(least_kept, "_TILE", tile)
    monkeypatch.setattr(least_kept, "_LANES", lanes)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1:4] = logits[1:4].round()  # many ties, and both zeros
    logits[5, 7:] = float("-inf")
    settings = [_settings(drawn, vocabulary) for _ in range(6)]
    _check(logits, settings)


def test_few_allowed_tokens_and_none() -> None:
    """Fewer tokens than top-k wants: all that are allowed count, for top-p too; none at all is no error."""
    logits = torch.full((3, 50), float("-inf"))
    logits[0, :4] = torch.tensor([0.0, -0.0, 1.0, -2.0])
    logits[1, 9] = -1e30
    settings = [SamplingParams(top_k=20, top_p=0.9)] * 3
    least = find_least(logits.to(KERNEL_DEVICE), make_filters(settings, 50, KERNEL_DEVICE)).cpu()
    assert [int((row >= bound).sum()) for row, bound in zip(logits[:2], least[:2], strict=True)] == [3, 1]


def test_the_largest_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 thousand tokens: top-k of 50, and top-p over a sharp and a flat row; in large tiles, to save time."""
    monkeypatch.setattr(least_kept, "_TILE", 65536)
    monkeypatch.setattr(least_kept, "_LANES", 16384)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    logits = torch.randn(3, 256_000, generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [[3.0], [4.0], [1.0]]
    )
    _check(logits, [SamplingParams(top_k=50, temperature=0.7), SamplingParams(top_p=0.9), SamplingParams(top_p=0.5)])


def _settings(drawn: random.Random, vocabulary: int) -> SamplingParams:
    return SamplingParams(
        temperature=drawn.choice([0.3, 1.0, 1.7]),
        top_k=drawn.choice([0, 0, 1, 2, 40, vocabulary // 2, vocabulary + 1]),
        top_p=drawn.choice([1.0, 1.0, 1e-6, 0.5, 0.9, 0.999]),
        min_p=drawn.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    )


def _check(logits: torch.Tensor, settings: list[SamplingParams]) -> None:
    vocabulary = logits.shape[1]
    least = find_least(logits.to(KERNEL_DEVICE), make_filters(settings, vocabulary, KERNEL_DEVICE)).cpu()
    for row, params, bound in zip(logits, settings, least, strict=True):
        _check_row(row / torch.tensor(params.temperature), params, float(bound))


def _check_row(row: torch.Tensor, params: SamplingParams, bound: float) -> None:
    """Min-p and top-k in float32, as the sampler has them, then top-p in float64, with room at its limit."""
    expected = float(row.max() + torch.tensor(params.min_p).log())
    if 0 < params.top_k < len(row):
        expected = max(expected, float(row.topk(params.top_k).values[-1]))
    kept = row >= bound
    if params.top_p == 1.0:
        assert torch.equal(kept & row.isfinite(), (row >= expected) & row.isfinite()), params
        return
    left = torch.where(row >= expected, row, float("-inf")).double().softmax(dim=0)
    assert torch.equal(row[kept].min(), torch.tensor(bound)), f"{params}: {bound} is none of the logits"
    assert bound >= expected, params
    assert float(left[row > bound].sum()) < params.top_p + ROUNDING, params
    assert float(left[kept].sum()) > params.top_p - ROUNDING, params
