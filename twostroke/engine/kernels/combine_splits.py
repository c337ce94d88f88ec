"""Kernel that joins what the splits of decode attention found."""

import torch
import triton
import triton.language as tl

from twostroke.engine.kernels.splits import MAX_SPLITS, SPLIT_TOKENS, split_tokens


def combine_splits(
    output: torch.Tensor, parts: torch.Tensor, peaks: torch.Tensor, lengths: torch.Tensor, window: int
) -> None:
    """Weighted mean of the splits of each token and head; the reference is one softmax over all of them.

    Moves 4 bytes times `head_dim + 1` a token, head and split in, and `tokens * heads * head_dim` elements out.

    Args:
        output: [tokens, heads, head_dim], contiguous; written.
        parts: float32 [tokens, heads, splits, head_dim], contiguous: the mean of each split's values.
        peaks: float32 [tokens, heads, splits], contiguous: log2 of the sum of a split's weights.
        lengths: int64 [tokens], as in `SingleTokens`.
        window: Tokens that are seen at most.
    """
    tokens, heads, splits, head_dim = parts.shape
    combine_splits_kernel[tokens, heads](
        output,
        parts,
        peaks,
        lengths,
        window,
        splits,
        SPLIT_TOKENS=SPLIT_TOKENS,
        MAX_SPLITS=MAX_SPLITS,
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["window", "splits"])
def combine_splits_kernel(
    output: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    lengths: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> None:
    """One program: one token and query head. Grid: (tokens, heads)."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    visible = tl.minimum(tl.load(lengths + tl.program_id(0)), window).to(tl.int32)
    used = tl.maximum(tl.cdiv(visible, split_tokens(visible, SPLIT_TOKENS, MAX_SPLITS)), 1)
    at = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, DIM_TILE)[None]
    peak = tl.load(peaks + row * splits + at, mask=at < used, other=float("-inf"))
    highest = tl.max(peak, 0)
    weights = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    read = (at < used)[:, None] & (dims < HEAD_DIM)
    means = tl.load(parts + (row * splits + at[:, None]) * HEAD_DIM + dims, mask=read, other=0.0)
    mean = tl.sum(means * weights[:, None], 0)[None] / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * HEAD_DIM + dims, mean.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
