"""The memory of the paged KV cache: one tensor a rank, in the layout that the transfer and attention share.

Layout, fixed: `[block, kv_head, layer, 2, token, head_dim]`, where 2 is K then V. A block is one run of bytes, and so
is a range of heads inside it: a transfer of whole blocks, or of the heads that another rank holds, needs no gathering.
"""

import mmap
from dataclasses import dataclass

import torch

from twostroke.engine.device.contract import GraphDevice
from twostroke.engine.interfaces import CacheMemory
from twostroke.protocol.config import KVCacheConfig
from twostroke.protocol.errors import ConfigError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one block.

    Attributes:
        kv_heads: KV heads that this rank holds.
        layers: Attention layers that keep K and V.
        block_size: Tokens in a block.
        head_dim: Elements of one head.
        dtype: Element type.
    """

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block: [kv_head, layer, 2, token, head_dim]."""
        return (self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    @property
    def block_elements(self) -> int:
        """Elements of one block."""
        return self.kv_heads * self.layers * 2 * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_elements * self.dtype.itemsize


def count_blocks(geometry: CacheGeometry, config: KVCacheConfig) -> int:
    """How many blocks the cache gets: `num_blocks`, or what fits into `cpu_memory_gib`.

    Raises:
        ConfigError: Not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    blocks = int(config.cpu_memory_gib * _GIB) // geometry.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"kv_cache.cpu_memory_gib: {config.cpu_memory_gib} GiB hold no block of {geometry.block_bytes} bytes; "
            f"set at least {geometry.block_bytes / _GIB:.3f}"
        )
    return blocks


class KVCache:
    """The cache of a rank, zero at first.

    Args:
        geometry: Sizes of a block.
        num_blocks: How many blocks.
        gpu: Whose memory it takes; None takes the host's.

    Raises:
        ConfigError: The host or the GPU refuses so much memory.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int, gpu: GraphDevice | None = None) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._gpu = gpu
        size = num_blocks * geometry.block_bytes
        flat = _map_pages(size, num_blocks) if gpu is None else gpu.allocate(size)
        self.tensor = flat.view(geometry.dtype).view(num_blocks, *geometry.block_shape)

    @property
    def memory(self) -> CacheMemory:
        """The cache as raw memory, for the transfer."""
        return CacheMemory(self.tensor.data_ptr(), self.geometry.block_bytes, self.num_blocks, self.tensor, self._gpu)


def _map_pages(size: int, num_blocks: int) -> torch.Tensor:
    """Bytes in an anonymous map of their own.

    It is page-aligned, so that UCX can register it, and in huge pages where the kernel grants them, since attention
    touches one small tile of every block.
    """
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"kv_cache: the host refused {size} bytes for {num_blocks} KV blocks ({error}); lower "
            "kv_cache.cpu_memory_gib or kv_cache.num_blocks"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
