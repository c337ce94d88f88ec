"""The cache's memory: layout, alignment, sizing."""

import mmap

import pytest
import torch

from twostroke.engine.kv_cache import CacheGeometry, KVCache, count_blocks
from twostroke.protocol.config import KVCacheConfig
from twostroke.protocol.errors import ConfigError

GEOMETRY = CacheGeometry(kv_heads=3, layers=2, block_size=4, head_dim=8, dtype=torch.bfloat16)


def test_blocks_lie_one_after_another_from_a_page_boundary() -> None:
    """Block `i` starts at `address + i * block_bytes`, and one head of it is one run of bytes."""
    cache = KVCache(GEOMETRY, 5)
    assert cache.memory.block_bytes == 3 * 2 * 2 * 4 * 8 * 2
    assert cache.memory.num_blocks == 5
    assert cache.memory.address % mmap.PAGESIZE == 0
    assert cache.tensor[2].data_ptr() == cache.memory.address + 2 * cache.memory.block_bytes
    assert cache.tensor.shape == (5, 3, 2, 2, 4, 8)
    assert cache.tensor.is_contiguous()
    assert not cache.tensor.any()


def test_number_of_blocks_comes_from_the_setting_or_from_memory() -> None:
    """`num_blocks` wins; otherwise as many as fit."""
    assert count_blocks(GEOMETRY, KVCacheConfig(num_blocks=7)) == 7
    assert count_blocks(GEOMETRY, KVCacheConfig(cpu_memory_gib=1000 * GEOMETRY.block_bytes / 2**30)) == 1000


def test_memory_that_holds_no_block_is_refused() -> None:
    """The message names the setting and the block's size."""
    with pytest.raises(ConfigError, match=r"kv_cache.cpu_memory_gib: 1e-07 GiB hold no block of 768 bytes"):
        count_blocks(GEOMETRY, KVCacheConfig(cpu_memory_gib=1e-7))
