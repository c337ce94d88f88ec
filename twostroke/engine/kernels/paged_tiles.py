"""Reading of K and V tiles through a block table, for kernels to call."""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    layer_cache: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    end: tl.tensor,
    block_stride: tl.tensor,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> tl.tensor:
    """K and V of a tile of tokens, each [tokens, DIM_TILE]; what lies outside is 0.

    Args:
        layer_cache: Where K of one KV head and layer begins in block 0.
        table: Where the sequence's block table begins; int64 block numbers, so that offsets have 64 bits.
        positions: int32 [tokens] of the sequence.
        end: Positions from here on are not read.
        block_stride: Elements from block to block.
        MASKED: Whether a position may be at `end` or beyond.
        BLOCK_SIZE: Tokens in a block.
        HEAD_DIM: Elements of a head.
        DIM_TILE: The power of two that holds them.
    """
    dims = tl.arange(0, DIM_TILE)[None]
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    keys_at = layer_cache + blocks[:, None] * block_stride + (positions % BLOCK_SIZE)[:, None] * HEAD_DIM + dims
    values_at = keys_at + BLOCK_SIZE * HEAD_DIM
    if MASKED:
        read = (positions < end)[:, None] & (dims < HEAD_DIM)
        keys = tl.load(keys_at, mask=read, other=0.0)
        values = tl.load(values_at, mask=read, other=0.0)
    elif HEAD_DIM != DIM_TILE:
        read = (positions >= 0)[:, None] & (dims < HEAD_DIM)
        keys = tl.load(keys_at, mask=read, other=0.0)
        values = tl.load(values_at, mask=read, other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)
    return keys, values
