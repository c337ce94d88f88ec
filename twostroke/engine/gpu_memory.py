"""How many KV blocks a GPU gets: a share of what is free once the largest step has its memory."""

from twostroke.engine.kv_cache import CacheGeometry
from twostroke.protocol.config import KVCacheConfig
from twostroke.protocol.errors import ConfigError


def count_gpu_blocks(geometry: CacheGeometry, config: KVCacheConfig, free_bytes: int, step_bytes: int) -> int:
    """How many blocks the cache gets: `num_blocks`, or what `memory_fraction` of the rest holds.

    Args:
        geometry: Sizes of a block.
        config: The cache's section.
        free_bytes: Free memory of the device, the weights being loaded.
        step_bytes: What the largest step takes, by a run.

    Raises:
        ConfigError: So much does not fit, or not even one block does.
    """
    left = free_bytes - step_bytes
    if config.num_blocks is not None:
        if config.num_blocks * geometry.block_bytes > left:
            raise ConfigError(
                f"kv_cache.num_blocks: {config.num_blocks} blocks of {geometry.block_bytes} bytes do not fit into the "
                f"{max(left, 0)} bytes that weights and steps leave of the GPU; set at most "
                f"{max(left, 0) // geometry.block_bytes}"
            )
        return config.num_blocks
    blocks = int(left * config.memory_fraction) // geometry.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"kv_cache.memory_fraction: {config.memory_fraction} of {max(left, 0)} bytes, which a step of {step_bytes} "
            f"bytes leaves of {free_bytes} free ones, hold no block of {geometry.block_bytes} bytes; lower "
            "max_batched_tokens, or end what else uses the GPU"
        )
    return blocks
