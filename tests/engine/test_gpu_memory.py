"""The KV cache of a GPU is sized from what weights and steps leave."""

import pytest
import torch

from twostroke.engine.gpu_memory import count_gpu_blocks
from twostroke.engine.kv_cache import CacheGeometry
from twostroke.protocol.config import KVCacheConfig
from twostroke.protocol.errors import ConfigError

GEOMETRY = CacheGeometry(kv_heads=1, layers=1, block_size=8, head_dim=32, dtype=torch.bfloat16)  # 1024 bytes a block


def test_a_share_of_what_a_step_leaves() -> None:
    """0.85 of (free - step), in whole blocks."""
    assert count_gpu_blocks(GEOMETRY, KVCacheConfig(), 1_124_000, 100_000) == 850


def test_a_set_number_must_fit() -> None:
    """It is taken whole, beyond the share, or refused with what would fit."""
    config = KVCacheConfig(num_blocks=1000)
    assert count_gpu_blocks(GEOMETRY, config, 1_124_000, 100_000) == 1000
    with pytest.raises(
        ConfigError, match=r"num_blocks: 1000 blocks of 1024 bytes do not fit into the 900000 bytes .* 878"
    ):
        count_gpu_blocks(GEOMETRY, config, 1_000_000, 100_000)


def test_no_room_is_refused() -> None:
    """A step that takes all there is."""
    with pytest.raises(
        ConfigError, match=r"memory_fraction: 0\.85 of 0 bytes, which a step of 2000 bytes leaves of 1000"
    ):
        count_gpu_blocks(GEOMETRY, KVCacheConfig(), 1000, 2000)
