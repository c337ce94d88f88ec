"""Attention of a whole prefill chunk: gather its K and V once, then matrix products in torch.

For more than a few tokens this beats attending token by token (measured), since each K and V is read once for all of
them. Queries are cut into tiles so that what lies right of the diagonal is mostly not computed.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from twostroke.engine.attention.contract import AttentionForm, ChunkSpan
from twostroke.engine.processor import multiplies_bfloat16

QUERY_TILE = 256


class ChunkAttention:
    """Attention of one chunk; called once a layer, after its own K and V are in the cache.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim].
        blocks: int64 [sum of table lengths]: block tables of the step.
        span: The chunk.
    """

    def __init__(self, cache: torch.Tensor, blocks: torch.Tensor, span: ChunkSpan) -> None:
        self._cache = cache
        self._span = span
        self._block_size = cache.shape[4]
        count = -(-(span.start + span.tokens) // self._block_size)
        self._table = blocks[span.first_block : span.first_block + count]
        slow = cache.dtype is torch.bfloat16 and not multiplies_bfloat16()
        self._dtype = torch.float32 if slow else cache.dtype
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # by tile and window: layers share them

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """Attend; `query`, `key` and `value` are the chunk's own, [tokens, heads or kv_heads, head_dim].

        Returns:
            [heads, tokens, head_dim], in the type that this processor multiplies well.
        """
        query, key, value = query.to(self._dtype), key.to(self._dtype), value.to(self._dtype)
        whole = self._span.start == 0 and (form.window is None or self._span.tokens <= form.window)
        if whole and form.softcap is None:
            return _library_attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), form, None)
        seen_from = 0 if form.window is None else max(0, self._span.start + 1 - form.window)
        first = seen_from // self._block_size  # the first block that any token sees
        keys, values = self._gather(layer, first)
        tiles = []
        for begin in range(0, self._span.tokens, QUERY_TILE):
            part = query[begin : begin + QUERY_TILE].transpose(0, 1)
            seen = self._span.start + begin + part.shape[1] - first * self._block_size
            mask = self._mask(begin, part.shape[1], first, form.window, query.dtype)
            attention = _library_attention if form.softcap is None else _capped_attention
            tiles.append(attention(part, keys[:, :seen], values[:, :seen], form, mask))
        return torch.cat(tiles, dim=1)

    def _gather(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V from block number `first` of the table on, each [kv_heads, tokens, head_dim]."""
        tiles = self._cache[self._table[first:], :, layer]  # [block, kv_head, 2, token, head_dim]
        keys, values = tiles.to(self._dtype).permute(2, 1, 0, 3, 4).flatten(2, 3)
        return keys, values

    def _mask(self, begin: int, tokens: int, first: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [tokens, seen] of the query tile that starts at chunk token `begin`."""
        mask = self._masks.get((begin, window))
        if mask is None:
            position = torch.arange(tokens)[:, None] + self._span.start + begin
            seen = torch.arange(first * self._block_size, self._span.start + begin + tokens)[None]
            hidden = seen > position
            if window is not None:
                hidden |= seen <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._masks[begin, window] = mask
        return mask


def _library_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm, mask: torch.Tensor | None
) -> torch.Tensor:
    """Torch's own attention; plain causal where there is no mask. All tensors are [heads, tokens, head_dim]."""
    return scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=form.scale, enable_gqa=True
    )[0]


def _capped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm, mask: torch.Tensor
) -> torch.Tensor:
    """As `_library_attention`, with a soft cap, which torch's lacks; in float32."""
    heads, tokens, head_dim = query.shape
    grouped = query.float().reshape(keys.shape[0], -1, head_dim)
    scores = (grouped @ keys.float().transpose(1, 2)).mul_(form.scale)
    if form.softcap is not None:
        scores.div_(form.softcap).tanh_().mul_(form.softcap)
    weights = scores.view(heads, tokens, -1).add_(mask).softmax(dim=-1)
    output = weights.view(keys.shape[0], -1, keys.shape[1]) @ values.float()
    return output.view(heads, tokens, head_dim).to(query.dtype)
