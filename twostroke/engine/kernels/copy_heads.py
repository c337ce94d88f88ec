"""Copies some KV heads of some blocks between the cache and a dense buffer: `head_copy` is the face, and the reference.

In the cache's layout, `[block, kv_head, layer, 2, token, head_dim]`, the wanted heads of a block are one run of bytes.
The kernel moves such runs as the widest integers that divide them, whatever the element type:

    program (i, j):  tile j of the run of blocks[i]   <->   tile j of row i of the buffer

Both sides are contiguous; the stride between blocks is `block_bytes`, between rows of the buffer `run_bytes`. A call
reads and writes `len(blocks) * run_bytes` each, and 8 bytes a program for the block's number. Offsets are 64 bits wide:
a cache may hold more than 2**31 elements.
"""

import torch
import triton
import triton.language as tl

_TILE = 2048
_WARPS = 4
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_runs(
    cache: tl.tensor,
    buffer: tl.tensor,
    blocks: tl.tensor,
    block_words: tl.tensor,
    first_word: tl.tensor,
    run_words: tl.tensor,
    gather: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One tile of one run.

    Args:
        cache: Words [blocks, block_words].
        buffer: Words [rows, run_words].
        blocks: int64 [rows].
        block_words: Words of a block.
        first_word: Where in a block the run starts.
        run_words: Words of a run.
        gather: Whether the buffer is written; else the cache is.
        tile: Words that a program moves.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = word < run_words
    in_cache = cache + tl.load(blocks + row) * block_words + first_word + word
    in_buffer = buffer + row * run_words + word
    if gather:
        tl.store(in_buffer, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside), mask=inside)


def copy_runs(cache: torch.Tensor, blocks: torch.Tensor, heads: range, buffer: torch.Tensor, *, gather: bool) -> None:
    """Copy `heads` of `blocks` into `buffer`, or back.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim], contiguous.
        blocks: int64 [rows], on the same device; all within the cache, and distinct unless `gather`.
        heads: Consecutive KV heads.
        buffer: [rows, len(heads), layer, 2, token, head_dim], contiguous, of the cache's type.
        gather: From the cache into the buffer; else from the buffer into the cache.
    """
    head_bytes = cache[0, 0].numel() * cache.element_size()
    starts = (cache.data_ptr(), buffer.data_ptr())
    word = next(word for word in _WORDS if not any(size % word.itemsize for size in (head_bytes, *starts)))
    head_words = head_bytes // word.itemsize
    run_words = len(heads) * head_words
    grid = (len(blocks), triton.cdiv(run_words, _TILE))
    _copy_runs[grid](
        cache.view(-1).view(word),
        buffer.view(-1).view(word),
        blocks,
        cache.shape[1] * head_words,
        heads.start * head_words,
        run_words,
        gather=gather,
        tile=_TILE,
        num_warps=_WARPS,
    )
