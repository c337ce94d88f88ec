"""Kernel for chunks of prompts over a cached prefix: all chunks of a step in one launch.

Rows of a tile are (token, query head) pairs of one KV head, so that a tile covers few tokens: what lies right of the
diagonal is skipped in whole tiles, and a short chunk still fills its rows with heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.engine.attention.contract import AttentionForm, ChunkSpan
from twostroke.engine.kernels.decode_attention import NO_WINDOW
from twostroke.engine.kernels.online_softmax import multiply, rescale, score_factors, scores_of, upcasts
from twostroke.engine.kernels.paged_tiles import load_tile

MAX_GROUP = 32
"""Query heads of a KV head at most: one token's must fit into a tile of the smallest form."""


@dataclass(frozen=True, slots=True)
class TileForm:
    """Sizes of a tile.

    Attributes:
        rows: (token, query head) pairs.
        keys: Keys that are read at once.
        warps: Groups of 32 threads that share the tile.
        stages: Tiles of keys in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def choose_tile_form(head_dim: int, dtype: torch.dtype) -> TileForm:
    """The form that fits Hopper's shared memory and, but for float32, its registers.

    Of the stages, one holds block numbers, and each tile of keys takes two more: K and V then wait for nothing that is
    read just before.
    """
    if dtype is torch.float32:
        return TileForm(rows=32, keys=32, warps=4, stages=2)
    if triton.next_power_of_2(head_dim) > 128:  # noqa: PLR2004 - elements of a row
        return TileForm(rows=128, keys=32, warps=8, stages=5)
    return TileForm(rows=128, keys=64, warps=8, stages=5)


def cut_into_tiles(chunks: Sequence[ChunkSpan], tile_tokens: int) -> torch.Tensor:
    """Tiles of up to `tile_tokens` tokens, int64 [tiles, 4]: first token in the step, tokens, position, first block.

    Tiles that see most come first: the GPU takes them in order, and a long one at the end would run alone.
    """
    tiles = [
        (span.first_token + begin, min(tile_tokens, span.tokens - begin), span.start + begin, span.first_block)
        for span in chunks
        for begin in range(0, span.tokens, tile_tokens)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 4)


def attend_chunks(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    tiles: torch.Tensor,
    form: AttentionForm,
) -> None:
    """Attention of the tokens of all tiles; the reference is `ReferenceAttention`.

    Moves `tokens * heads * head_dim` elements in and out, and reads, for each tile, `2 * kv_heads * head_dim` elements
    of the cache for each token that one of its tokens sees. Does `4 * heads * head_dim` operations for each pair of a
    token and a token that it sees, and half a tile's more at the diagonal.

    Args:
        output: [tokens, heads, head_dim], contiguous; the tiles' tokens are written.
        query: [tokens, heads, head_dim]; any strides for token and head, head_dim contiguous.
        cache: [block, kv_head, layer, 2, token, head_dim]; any strides for block, head and layer, the rest contiguous.
        layer: Which layer.
        blocks: int64 [sum of table lengths], contiguous, on the device.
        tiles: From `cut_into_tiles` with `choose_tile_form(...).rows // group` tokens; on the device.
        form: How this layer attends.
    """
    if not len(tiles):
        return
    _, heads, head_dim = query.shape
    kv_heads = cache.shape[1]
    shape = choose_tile_form(head_dim, cache.dtype)
    prefill_attention_kernel[len(tiles), kv_heads](
        output,
        query,
        cache,
        blocks,
        tiles,
        layer,
        NO_WINDOW if form.window is None else form.window,
        *score_factors(form),
        *query.stride()[:2],
        *cache.stride()[:3],
        GROUP=heads // kv_heads,
        ROWS=shape.rows,
        KEY_TILE=shape.keys,
        BLOCK_SIZE=cache.shape[4],
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        SOFTCAP=form.softcap is not None,
        UPCAST=upcasts(cache.dtype),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


@triton.jit(do_not_specialize=["layer", "window"])
def prefill_attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
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
    ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One program: one tile of tokens, all query heads of one KV head. Grid: (tiles, kv_heads)."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1).to(tl.int64)
    first_token = tl.load(tile)
    tokens = tl.load(tile + 1).to(tl.int32)
    start = tl.load(tile + 2).to(tl.int32)
    table = tables + tl.load(tile + 3)
    layer_cache = cache + kv_head * head_stride + layer.to(tl.int64) * layer_stride

    row = tl.arange(0, ROWS)
    own = row // GROUP  # the row's token in the tile
    dims = tl.arange(0, DIM_TILE)[None]
    real = (own < tokens)[:, None] & (dims < HEAD_DIM)
    token = (first_token + own)[:, None]
    head = (kv_head * GROUP + row % GROUP)[:, None]
    queries = tl.load(query + token * query_token_stride + head * query_head_stride + dims, mask=real, other=0.0)
    positions = start + own
    end = start + tokens

    # Key tiles, counted from position 0. What all rows see whole needs no mask; at both edges some see a part.
    first = tl.maximum(start + 1 - window, 0) // KEY_TILE
    last = tl.cdiv(end, KEY_TILE)
    whole_from = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEY_TILE), last)
    whole_to = tl.maximum((start + 1) // KEY_TILE, whole_from)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for at in tl.range(whole_from, whole_to):
        seen = at * KEY_TILE + tl.arange(0, KEY_TILE)
        keys, values = load_tile(layer_cache, table, seen, end, block_stride, False, BLOCK_SIZE, HEAD_DIM, DIM_TILE)
        products = multiply(queries, tl.trans(keys), tl.zeros([ROWS, KEY_TILE], tl.float32), UPCAST)
        peak, weights, shrink = rescale(peak, scores_of(products, inner, outer, SOFTCAP))
        total = total * shrink + tl.sum(weights, 1)
        mean = multiply(weights.to(values.dtype), values, mean * shrink[:, None], UPCAST)
    left = whole_from - first
    for edge in tl.range(0, left + last - whole_to):
        at = tl.where(edge < left, first + edge, whole_to + edge - left)
        seen = at * KEY_TILE + tl.arange(0, KEY_TILE)
        keys, values = load_tile(layer_cache, table, seen, end, block_stride, True, BLOCK_SIZE, HEAD_DIM, DIM_TILE)
        products = multiply(queries, tl.trans(keys), tl.zeros([ROWS, KEY_TILE], tl.float32), UPCAST)
        behind = positions[:, None] - seen[None]
        scores = tl.where((behind >= 0) & (behind < window), scores_of(products, inner, outer, SOFTCAP), float("-inf"))
        peak, weights, shrink = rescale(peak, scores)
        total = total * shrink + tl.sum(weights, 1)
        mean = multiply(weights.to(values.dtype), values, mean * shrink[:, None], UPCAST)

    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    heads_of_all = tl.num_programs(1) * GROUP
    tl.store(output + (token * heads_of_all + head) * HEAD_DIM + dims, mean.to(output.dtype.element_ty), mask=real)
