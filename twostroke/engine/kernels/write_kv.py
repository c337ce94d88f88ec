"""Kernel that writes a step's new K and V into the paged cache."""

import torch
import triton
import triton.language as tl

ROWS = 16
"""(token, KV head) pairs that one program writes."""


def write_kv(cache: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K and V of one layer at `slots`; the reference is `attention.reference.write_kv`.

    Moves `2 * tokens * kv_heads * head_dim` elements once in and once out, and 8 bytes a token for its slot.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim]; any strides for block, head and layer, the rest contiguous.
        layer: Which layer.
        key: [tokens, kv_heads, head_dim], the cache's dtype; any strides for token and head, head_dim contiguous.
        value: As `key`, with strides of its own.
        slots: int64 [tokens], contiguous: `block * block_size + offset`. A negative slot is not written, so that a
            padded step touches nothing.
    """
    tokens, kv_heads, head_dim = key.shape
    if not tokens:
        return
    write_kv_kernel[(triton.cdiv(tokens * kv_heads, ROWS),)](
        cache,
        key,
        value,
        slots,
        tokens,
        layer,
        *cache.stride()[:3],
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=kv_heads,
        ROWS=ROWS,
        BLOCK_SIZE=cache.shape[4],
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["tokens", "layer"])
def write_kv_kernel(
    cache: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> None:
    """One program: `ROWS` pairs of a token and a KV head. Grid: (tokens * kv_heads / ROWS)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // KV_HEADS
    slot = tl.load(slots + token, mask=token < tokens, other=-1)[:, None]
    token = token[:, None]
    head = (row % KV_HEADS)[:, None]
    dims = tl.arange(0, DIM_TILE)[None]
    written = (slot >= 0) & (dims < HEAD_DIM)
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + dims, mask=written)
    values = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=written)
    target = cache + (slot // BLOCK_SIZE) * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride
    target += (slot % BLOCK_SIZE) * HEAD_DIM + dims
    tl.store(target, keys, mask=written)
    tl.store(target + BLOCK_SIZE * HEAD_DIM, values, mask=written)
