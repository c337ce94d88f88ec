"""The kernel that writes K and V against the reference's write; bit for bit."""

import random

import pytest
import torch

from twostroke.engine.attention import reference
from twostroke.engine.kernels.write_kv import ROWS, write_kv

BLOCKS = 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "block_size", "tokens"),
    [(1, 64, 8, 1), (3, 80, 16, 20), (ROWS, 96, 24, 5), (2, 128, 128, 33), (5, 256, 32, 7)],
)
def test_writes_what_the_reference_writes(
    dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int, tokens: int
) -> None:
    """Keys and values with different strides, into slots in any order."""
    slots = torch.tensor(random.Random(tokens).sample(range(BLOCKS * block_size), tokens))
    key = torch.randn(kv_heads, tokens, head_dim).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, kv_heads, 2 * head_dim).to(dtype)[:, :, :head_dim]
    written, expected = (torch.zeros((BLOCKS, kv_heads, 3, 2, block_size, head_dim), dtype=dtype) for _ in range(2))
    write_kv(written, 2, key, value, slots)
    reference.write_kv(expected, 2, key, value, slots)
    assert torch.equal(written, expected)


def test_a_negative_slot_is_not_written() -> None:
    """Padding of a step touches nothing."""
    cache = torch.zeros(2, 1, 1, 2, 8, 64)
    ones = torch.ones(3, 1, 64)
    write_kv(cache, 0, ones, ones, torch.tensor([-1, 9, -1]))
    assert cache.sum() == 2 * 64
    assert cache[1, 0, 0, :, 1].sum() == 2 * 64
