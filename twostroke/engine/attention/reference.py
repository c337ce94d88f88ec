"""The reference: plain torch, one token at a time, in float32 or more. Slow, and easy to believe.

Over a float64 copy of a cache, with queries, keys and values likewise, it is exact enough to measure others by.
"""

import torch

from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, StepAttention


class ReferenceAttention:
    """Attention backend that other backends are tested against; runs on any device.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim]; float64 is computed in float64, anything else in float32.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache

    def prepare(self, batch: AttentionBatch) -> StepAttention:
        """See `AttentionBackend`."""
        return _ReferenceStep(self._cache, batch)


class _ReferenceStep:
    """One step over the cache."""

    def __init__(self, cache: torch.Tensor, batch: AttentionBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._views = list(_token_views(batch))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """See `StepAttention`."""
        write_kv(self._cache, layer, key, value, self._batch.slots)
        output = torch.empty_like(query)
        for token, (first_block, length) in enumerate(self._views):
            keys, values = self._read(layer, first_block, length)
            output[token] = _attend_one(query[token], keys, values, form)
        return output

    def _read(self, layer: int, first_block: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` tokens of a block table, each [kv_heads, length, head_dim], float32 or more."""
        block_size = self._cache.shape[4]
        blocks = self._batch.blocks[first_block : first_block + -(-length // block_size)]
        tiles = self._cache[blocks, :, layer].permute(2, 1, 0, 3, 4)  # [2, kv_head, block, token, head_dim]
        keys, values = tiles.flatten(2, 3)[:, :, :length].to(torch.promote_types(tiles.dtype, torch.float32))
        return keys, values


def _token_views(batch: AttentionBatch) -> list[tuple[int, int]]:
    """For each token of the step: the start of its block table and how many tokens it sees."""
    views = list(zip(batch.singles.first_block.tolist(), batch.singles.lengths.tolist(), strict=True))
    for span in batch.chunks:
        views += [(span.first_block, span.start + offset + 1) for offset in range(span.tokens)]
    return views


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Softmax attention of one token: `query` [heads, head_dim], `keys` and `values` [kv_heads, length, head_dim]."""
    if form.window is not None:
        keys, values = keys[:, -form.window :], values[:, -form.window :]
    grouped = query.to(keys.dtype).reshape(keys.shape[0], -1, keys.shape[2])
    scores = grouped @ keys.transpose(1, 2) * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    return (scores.softmax(dim=-1) @ values).reshape(query.shape).to(query.dtype)


def write_kv(cache: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K and V [tokens, kv_heads, head_dim] of one layer at `slots`."""
    block_size = cache.shape[4]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    cache[blocks, :, layer, 0, offsets] = key
    cache[blocks, :, layer, 1, offsets] = value
