"""Kernel for tokens that attend by themselves: decodes, and slices of a few tokens.

The context is split over programs (`splits.py`), so that one long sequence fills the GPU too. All query heads of a KV
head share a program, which reads that head's K and V once. A second kernel joins the splits; where no token sees more
than one split, the first writes the result itself.
"""

import torch
import triton
import triton.language as tl

from twostroke.engine.attention.contract import AttentionForm, SingleTokens
from twostroke.engine.kernels.combine_splits import combine_splits
from twostroke.engine.kernels.online_softmax import multiply, rescale, score_factors, scores_of, upcasts
from twostroke.engine.kernels.paged_tiles import load_tile
from twostroke.engine.kernels.splits import MAX_SPLITS, SPLIT_TOKENS, count_splits, split_tokens

NO_WINDOW = (1 << 31) - 1
"""Stands for a layer without a window: more tokens than a sequence has."""
_MATRIX_ROWS = 16  # the least that a matrix product takes


def attend_singles(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    singles: SingleTokens,
    longest: int,
    form: AttentionForm,
) -> None:
    """Attention of single tokens; the reference is `ReferenceAttention`.

    Reads `2 * kv_heads * head_dim` elements of the cache for each token that a token sees, each once, and 8 bytes of
    its block table a KV head; moves `tokens * heads * head_dim` elements in and out. With s > 1 splits, 4 bytes times
    `s * tokens * heads * (head_dim + 1)` go out and in again between the two kernels.

    Args:
        output: [tokens, heads, head_dim], contiguous; written.
        query: [tokens, heads, head_dim]; any strides for token and head, head_dim contiguous.
        cache: [block, kv_head, layer, 2, token, head_dim]; any strides for block, head and layer, the rest contiguous.
        layer: Which layer.
        blocks: int64 [sum of table lengths], contiguous, on the device.
        singles: Where each token's table begins and what it sees; on the device. A length of 0 gives zeros.
        longest: The largest of `singles.lengths`, or a bound of it.
        form: How this layer attends.
    """
    tokens, heads, head_dim = query.shape
    if not tokens:
        return
    window = NO_WINDOW if form.window is None else form.window
    splits = count_splits(min(longest, window))
    parts, peaks = output, output
    if splits > 1:
        parts = torch.empty((tokens, heads, splits, head_dim), dtype=torch.float32, device=query.device)
        peaks = torch.empty((tokens, heads, splits), dtype=torch.float32, device=query.device)
    kv_heads = cache.shape[1]
    group = heads // kv_heads
    key_tile = 64 if head_dim * cache.element_size() <= 256 else 32  # noqa: PLR2004 - bytes of a row
    decode_attention_kernel[tokens, kv_heads, splits](
        parts,
        peaks,
        query,
        cache,
        blocks,
        singles.first_block,
        singles.lengths,
        layer,
        window,
        *score_factors(form),
        *query.stride()[:2],
        *cache.stride()[:3],
        GROUP=group,
        GROUP_TILE=max(_MATRIX_ROWS, triton.next_power_of_2(group)),
        KEY_TILE=key_tile,
        BLOCK_SIZE=cache.shape[4],
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        SOFTCAP=form.softcap is not None,
        SPLIT=splits > 1,
        SPLIT_TOKENS=SPLIT_TOKENS,
        MAX_SPLITS=MAX_SPLITS,
        UPCAST=upcasts(cache.dtype),
        num_warps=4,
        num_stages=5,
    )
    if splits > 1:
        combine_splits(output, parts, peaks, singles.lengths, window)


@triton.jit(do_not_specialize=["layer", "window"])
def decode_attention_kernel(
    parts: tl.tensor,
    peaks: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    first_block: tl.tensor,
    lengths: tl.tensor,
    layer: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_stride: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One program: one token, KV head and split. Grid: (tokens, kv_heads, splits)."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + token).to(tl.int32)
    visible = tl.minimum(length, window)
    size = split_tokens(visible, SPLIT_TOKENS, MAX_SPLITS)
    begin = length - visible + split * size
    end = tl.minimum(begin + size, length)
    if (begin >= length) & (split > 0):
        return

    heads = tl.arange(0, GROUP_TILE)[:, None]
    dims = tl.arange(0, DIM_TILE)[None]
    real = (heads < GROUP) & (dims < HEAD_DIM)
    query_at = query + token * query_token_stride + (kv_head * GROUP + heads) * query_head_stride + dims
    queries = tl.load(query_at, mask=real, other=0.0)
    layer_cache = cache + kv_head * head_stride + layer.to(tl.int64) * layer_stride
    table = tables + tl.load(first_block + token)

    peak = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mean = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for tile in tl.range(begin, end, KEY_TILE):
        positions = tile + tl.arange(0, KEY_TILE)
        keys, values = load_tile(layer_cache, table, positions, end, block_stride, True, BLOCK_SIZE, HEAD_DIM, DIM_TILE)
        products = multiply(queries, tl.trans(keys), tl.zeros([GROUP_TILE, KEY_TILE], tl.float32), UPCAST)
        scores = scores_of(products, inner, outer, SOFTCAP)
        scores = tl.where((positions < end)[None], scores, float("-inf"))
        peak, weights, shrink = rescale(peak, scores)
        total = total * shrink + tl.sum(weights, 1)
        mean = multiply(weights.to(values.dtype), values, mean * shrink[:, None], UPCAST)

    total = tl.where(total == 0.0, 1.0, total)  # of a padded row
    mean = mean / total[:, None]
    heads_of_all = tl.num_programs(1) * GROUP
    row = token * heads_of_all + kv_head * GROUP + heads
    if SPLIT:
        row = row * tl.num_programs(2) + split
        tl.store(peaks + row, (peak + tl.log2(total))[:, None], mask=heads < GROUP)
    tl.store(parts + row * HEAD_DIM + dims, mean.to(parts.dtype.element_ty), mask=real)
