"""Copies some KV heads of some blocks out of the cache into a dense buffer, and back.

Workers with unlike tensor-parallel sizes hold unlike ranges of heads. Where the heads that one has and the other wants
are many short runs, it is cheaper to gather them into one buffer, send that, and scatter it on the other side.

On a CPU torch copies, which is also the reference for the GPU's kernel. The device of the cache decides.
"""

from collections.abc import Sequence

import torch


def gather_heads(cache: torch.Tensor, blocks: Sequence[int], heads: range, buffer: torch.Tensor) -> None:
    """Copy `heads` of `blocks` from the cache into `buffer`.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim], contiguous.
        blocks: Which blocks, in the buffer's order; one may come several times.
        heads: Consecutive KV heads.
        buffer: [len(blocks), len(heads), layer, 2, token, head_dim], contiguous, the cache's type and device.

    Raises:
        ValueError: A block or head is not in the cache, the buffer does not fit, or the device is not served.
    """
    _check(cache, blocks, heads, buffer)
    if not blocks:
        return
    if cache.device.type == "cpu":
        torch.index_select(cache[:, heads.start : heads.stop], 0, torch.tensor(blocks), out=buffer)
        return
    from twostroke.engine.kernels.copy_heads import copy_runs  # noqa: PLC0415 - triton is only there beside a GPU

    copy_runs(cache, torch.tensor(blocks, device=cache.device), heads, buffer, gather=True)


def scatter_heads(cache: torch.Tensor, blocks: Sequence[int], heads: range, buffer: torch.Tensor) -> None:
    """Copy `buffer` into `heads` of `blocks` of the cache: the way back of `gather_heads`.

    Raises:
        ValueError: As `gather_heads`, and if a block comes twice.
    """
    _check(cache, blocks, heads, buffer)
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"blocks to write must be distinct, not {list(blocks)}")
    if not blocks:
        return
    if cache.device.type == "cpu":
        cache[:, heads.start : heads.stop].index_copy_(0, torch.tensor(blocks), buffer)
        return
    from twostroke.engine.kernels.copy_heads import copy_runs  # noqa: PLC0415 - triton is only there beside a GPU

    copy_runs(cache, torch.tensor(blocks, device=cache.device), heads, buffer, gather=False)


def _check(cache: torch.Tensor, blocks: Sequence[int], heads: range, buffer: torch.Tensor) -> None:
    if cache.device.type not in {"cpu", "cuda"}:
        raise ValueError(f"KV heads are copied on cpu and cuda, not on {cache.device}")
    if blocks and not 0 <= min(blocks) <= max(blocks) < cache.shape[0]:
        raise ValueError(f"blocks must be within 0 and {cache.shape[0] - 1}, not {min(blocks)} to {max(blocks)}")
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= cache.shape[1]:
        raise ValueError(f"heads must be a range within 0 and {cache.shape[1]}, not {heads}")
    shape = (len(blocks), len(heads), *cache.shape[2:])
    if tuple(buffer.shape) != shape or (buffer.dtype, buffer.device) != (cache.dtype, cache.device):
        raise ValueError(
            f"the buffer must be {shape}, {cache.dtype} on {cache.device}, "
            f"not {tuple(buffer.shape)}, {buffer.dtype} on {buffer.device}"
        )
    if not cache.is_contiguous() or not buffer.is_contiguous():
        raise ValueError(f"cache and buffer must be contiguous, not of strides {cache.stride()} and {buffer.stride()}")
