"""Gumbel-max on the GPU draws the tokens that the CPU draws."""

import random

import pytest
import torch

from tests.support.kernel_device import KERNEL_DEVICE
from twostroke.engine.kernels import draw as module
from twostroke.engine.kernels.draw import draw
from twostroke.engine.sampler import gumbel_max

NONE_KEPT_OUT = float("-inf")


@pytest.mark.parametrize("vocabulary", [100, 1500])
def test_tokens_are_those_of_the_tensor_version(vocabulary: int) -> None:
    """Sharp, flat, filtered and forbidden rows, over one tile and two, at temperatures of their own."""
    logits, temperatures, least, seeds, indexes = _step(6, vocabulary)
    scaled = logits / temperatures[:, None]
    expected = gumbel_max(scaled.masked_fill(scaled < least[:, None], float("-inf")), seeds, indexes)
    assert torch.equal(_draw(logits, temperatures, least, seeds, indexes), expected)


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    """Without noise; ties within a tile and across tiles."""
    logits = torch.zeros(3, 2100)
    logits[0, [700, 800]], logits[1, [1023, 1024, 2099]], logits[2] = 1.0, 1.0, float("-inf")
    zeros, integers = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    assert _draw(logits, zeros, zeros + NONE_KEPT_OUT, integers, integers).tolist() == [700, 1023, 0]


def test_a_token_does_not_depend_on_who_shares_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program a row, or one a tile."""
    step = _step(2, 3000)
    shared = _draw(*step)
    monkeypatch.setattr(module, "_PROGRAMS", 1)
    assert torch.equal(_draw(*step), shared)


def test_the_largest_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 thousand tokens, in large tiles, to save time."""
    monkeypatch.setattr(module, "_TILE", 65536)
    logits, temperatures, least, seeds, indexes = _step(1, 256_000)
    expected = gumbel_max(logits / temperatures[:, None], seeds, indexes)
    assert torch.equal(_draw(logits, temperatures, least, seeds, indexes), expected)


def _step(rows: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Logits, temperatures, least kept logits, seeds and output indexes."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * torch.logspace(0, 1.5, rows)[:, None]
    least = torch.full((rows,), NONE_KEPT_OUT)
    if rows > 3:
        logits[1, 5:] = float("-inf")
        logits[2] = float("-inf")
        least[3] = logits[3].topk(9).values[-1] / 0.5
    temperatures = torch.tensor([1.0, 0.7, 2.0, 0.5, 1.0, 30.0])[:rows]
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    return logits, temperatures, least, seeds, torch.arange(rows) * 1_000_003


def _draw(*step: torch.Tensor) -> torch.Tensor:
    return draw(*(part.to(KERNEL_DEVICE) for part in step)).cpu()
