"""Blocks' heads through the kernel: the bytes that torch moves, and no others."""

import random

import pytest
import torch

from tests.support.kernel_device import KERNEL_DEVICE
from twostroke.engine.head_copy import gather_heads, scatter_heads
from twostroke.engine.kernels.copy_heads import copy_runs

SHAPES = [(1, 1, 8, 64), (3, 2, 16, 80), (8, 2, 8, 96), (2, 3, 128, 128), (4, 1, 16, 256), (3, 1, 1, 5)]
"""KV heads, layers, tokens of a block, elements of a head; the last has runs of odd length in int8."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_are_those_of_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """A random range of heads of random blocks: the buffer after gathering, the whole cache after scattering."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    kv_heads, layers, block_size, head_dim = shape
    cache = _noise((7, kv_heads, layers, 2, block_size, head_dim), dtype, seed)
    start = drawn.randrange(kv_heads)
    heads = range(start, drawn.randint(start + 1, kv_heads))
    blocks = drawn.sample(range(7), 3)
    index = torch.tensor(blocks, device=KERNEL_DEVICE)

    buffer = _noise((3, len(heads), *cache.shape[2:]), dtype, seed + 1)
    gathered = buffer.clone()
    copy_runs(cache, index, heads, gathered, gather=True)
    expected = torch.empty_like(buffer)
    gather_heads(cache, blocks, heads, expected)
    assert torch.equal(_bits(gathered), _bits(expected))

    scattered, expected = cache.clone(), cache.clone()
    copy_runs(scattered, index, heads, buffer, gather=False)
    scatter_heads(expected, blocks, heads, buffer)
    assert torch.equal(_bits(scattered), _bits(expected))


def test_offsets_beyond_two_to_the_31() -> None:
    """A cache of more than 2**31 words of two bytes; only the pages of two blocks are ever touched."""
    shape = (2, 1, 2, 1, 5)  # runs of 20 bytes and an odd head_dim: words of 4 bytes would do, so shift the start
    block = 2 * 1 * 2 * 1 * 5
    count = (1 << 31) // block + 3
    flat = torch.empty(count * block + 1, dtype=torch.bfloat16, device=KERNEL_DEVICE)[1:]
    cache = flat.view(count, *shape)
    assert cache.data_ptr() % 4 == 2
    cache[0], cache[-1] = 1.0, 2.0
    blocks = torch.tensor([count - 1, 0], device=KERNEL_DEVICE)
    buffer = torch.zeros(2, 1, *shape[1:], dtype=torch.bfloat16, device=KERNEL_DEVICE)
    copy_runs(cache, blocks, range(1, 2), buffer, gather=True)
    assert (buffer[0] == 2.0).all()
    assert (buffer[1] == 1.0).all()
    copy_runs(cache, blocks, range(1, 2), buffer + 2.0, gather=False)
    assert cache[-1, :, 0, 0, 0, 0].tolist() == [2.0, 4.0]
    assert cache[0, :, 0, 0, 0, 0].tolist() == [1.0, 3.0]


def _noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    random_bytes = torch.Generator().manual_seed(seed)
    *outer, head_dim = shape
    bits = torch.randint(0, 255, (*outer, head_dim * dtype.itemsize), dtype=torch.uint8, generator=random_bytes)
    return bits.view(dtype).to(KERNEL_DEVICE)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
