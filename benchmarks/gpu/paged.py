"""Random paged caches and steps over them, for the parts that measure attention alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostroke.engine.attention.contract import AttentionBatch
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.packing import pack
from twostroke.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """A model's attention as its kernels see it.

    Attributes:
        layers: Of the cache; a pass goes through all, so that no layer is found in the GPU's own caches.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    block_size: int
    dtype: torch.dtype

    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def cache(self, blocks: int, device: torch.device) -> torch.Tensor:
        """A random cache."""
        shape = (blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=device).normal_()

    def inputs(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random query, key and value of a step, as the model library lays them out."""
        query, key, value = (
            torch.empty(heads, tokens, self.head_dim, dtype=self.dtype, device=device).normal_().transpose(0, 1)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return query, key, value


def scattered_plan(sizes: AttentionSizes, slices: Sequence[tuple[int, int]]) -> tuple[StepPlan, int]:
    """A step of slices of (start, tokens) over scattered blocks, and how many blocks the cache needs."""
    needed = [-(-(start + tokens) // sizes.block_size) for start, tokens in slices]
    free = list(range(sum(needed)))
    random.Random(5).shuffle(free)
    greedy = SamplingParams(temperature=0.0)
    parts = []
    for request_id, ((start, tokens), count) in enumerate(zip(slices, needed, strict=True)):
        table, free = free[:count], free[count:]
        parts.append(SequenceSlice(request_id, [3] * tokens, start, table, True, greedy, 0))
    return StepPlan(parts), sum(needed)


def packed_batch(plan: StepPlan, block_size: int, device: torch.device) -> AttentionBatch:
    """What attention is told of a step, on the device."""
    batch = pack(plan, block_size).attention
    singles = type(batch.singles)(batch.singles.first_block.to(device), batch.singles.lengths.to(device))
    return AttentionBatch(batch.slots.to(device), batch.blocks.to(device), singles, batch.chunks)
