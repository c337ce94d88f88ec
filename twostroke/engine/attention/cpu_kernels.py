"""Compiled loops of the CPU path: they read and write KV blocks in place.

All sums are in float32; `compiled_numbers` says how bfloat16 is read.

Measured, not obvious: sizes that are constants at compile time halve the time of the inner loops, so a kernel is made
for each geometry; and most of the remaining time was spent waiting for the next block (the cache is far larger than the
processor's), which prefetching it hides.
"""

# ruff: noqa: PLR0917 - compiled functions take plain arrays and numbers, not objects

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it has no stubs
from numba import types
from numba.extending import intrinsic

from twostroke.engine.compiled_dots import LANES, OUTPUTS, dots_of_1, dots_of_2, dots_of_3
from twostroke.engine.compiled_numbers import ONE, ZERO, exp_below_zero, inlined, narrow, widen
from twostroke.engine.compiling import Kernel, compile_kernel

_MASKED = np.float32(-1e30)  # finite: fast math assumes that there are no infinities
_CACHE_LINE_BYTES = 64


@intrinsic
def _prefetch(_context: Any, array: Any, _index: Any) -> Any:
    """`_prefetch(array, index)`: ask for the cache line of `array[index]` (contiguous, one dimension)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(start, [arguments[1]]), byte_pointer)
        signature_type = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte_pointer,), signature_type)
        builder.call(prefetch, [address, word(0), word(3), word(1)])  # for reading, into the nearest cache, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@inlined
def _prefetch_span(cache: Any, start: Any, span: int, line: int) -> None:
    for i in range(0, span, line):
        _prefetch(cache, start + i)  # type: ignore[call-arg]  # the compiler gives the first argument


@inlined
def _load_tile(tile: Any, stored: Any, block_size: int, head_dim: int, bits: bool) -> None:  # noqa: FBT001 - a constant of the kernel
    """Copy a block's K or V as float32."""
    flat = tile.reshape(block_size * head_dim)
    for i in range(block_size * head_dim):
        flat[i] = widen(stored[i]) if bits else stored[i]


@inlined
def _clear_behind(tile: Any, valid: Any, block_size: int, head_dim: int) -> None:
    """Make V zero past `valid` tokens: whatever lies there could be NaN."""
    for j in range(valid, block_size):
        for d in range(head_dim):
            tile[j, d] = ZERO


@inlined
def _score_in_place(
    scores: Any, query: Any, cache: Any, start: Any, group: int, block_size: int, head_dim: int
) -> None:
    """`scores[g, j] = query[g] . K[j]`, with K where it lies, from `start` on; for sizes that fill registers."""
    queries, results = query.reshape(group * head_dim), scores.reshape(group * block_size)
    for j in range(0, block_size, OUTPUTS):
        k = start + j * head_dim
        for g in range(0, group - 2, 3):
            dots_of_3(cache, k, queries, g * head_dim, results, g * block_size + j, head_dim, block_size)
        rest = group % 3
        g = group - rest
        if rest > 1:
            dots_of_2(cache, k, queries, g * head_dim, results, g * block_size + j, head_dim, block_size)
        elif rest > 0:
            dots_of_1(cache, k, queries, g * head_dim, results, g * block_size + j, head_dim, block_size)


@inlined
def _score(scores: Any, query: Any, tile: Any, group: int, block_size: int, head_dim: int) -> None:
    """`scores[g, j] = query[g] . K[j]`, four tokens at once to hide the latency of the sums."""
    for g in range(group):
        for j in range(0, block_size - block_size % 4, 4):
            dot0, dot1, dot2, dot3 = ZERO, ZERO, ZERO, ZERO
            for d in range(head_dim):
                q = query[g, d]
                dot0 += q * tile[j, d]
                dot1 += q * tile[j + 1, d]
                dot2 += q * tile[j + 2, d]
                dot3 += q * tile[j + 3, d]
            scores[g, j] = dot0
            scores[g, j + 1] = dot1
            scores[g, j + 2] = dot2
            scores[g, j + 3] = dot3
        for j in range(block_size - block_size % 4, block_size):
            dot0 = ZERO
            for d in range(head_dim):
                dot0 += query[g, d] * tile[j, d]
            scores[g, j] = dot0


@inlined
def _cap_and_mask(scores: Any, softcap: Any, hidden: Any, valid: Any, group: int, block_size: int) -> None:
    """Apply the soft cap, then hide the tokens before `hidden` (out of the window) and from `valid` on (not there)."""
    for g in range(group):
        if softcap > ZERO:
            for j in range(block_size):
                scores[g, j] = softcap * np.tanh(scores[g, j] / softcap)
        for j in range(hidden):
            scores[g, j] = _MASKED
        for j in range(valid, block_size):
            scores[g, j] = _MASKED


@inlined
def _fold(
    total: Any, maximum: Any, weight: Any, scores: Any, tile: Any, group: int, block_size: int, head_dim: int
) -> None:
    """Add one block to the online softmax; `scores` become unnormalised weights."""
    for g in range(group):
        highest = maximum[g]
        for j in range(block_size):
            highest = max(highest, scores[g, j])
        if highest > maximum[g]:
            shrink = exp_below_zero(maximum[g] - highest)
            maximum[g] = highest
            weight[g] *= shrink
            for d in range(head_dim):
                total[g, d] *= shrink
        added = ZERO
        for j in range(block_size):
            part = exp_below_zero(scores[g, j] - highest)
            scores[g, j] = part
            added += part
        weight[g] += added
        for j in range(0, block_size - block_size % 4, 4):
            p0, p1, p2, p3 = scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3]
            for d in range(head_dim):
                v0, v1 = tile[j, d], tile[j + 1, d]
                v2, v3 = tile[j + 2, d], tile[j + 3, d]
                total[g, d] += p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
        for j in range(block_size - block_size % 4, block_size):
            p0 = scores[g, j]
            for d in range(head_dim):
                total[g, d] += p0 * tile[j, d]


def make_write_kernel() -> Kernel:
    """A compiled `write(cache, slots, key, value, layer)`.

    It stores `key` and `value` [tokens, kv_heads, head_dim] of one layer at `slots` [tokens] of `cache`
    [block, kv_head, layer, 2, token, head_dim].
    """

    def write(cache: Any, slots: Any, key: Any, value: Any, layer: int) -> None:
        block_size = cache.shape[4]
        for token in range(slots.shape[0]):
            block, offset = slots[token] // block_size, slots[token] % block_size
            for head in range(key.shape[1]):
                for d in range(key.shape[2]):
                    cache[block, head, layer, 0, offset, d] = key[token, head, d]
                    cache[block, head, layer, 1, offset, d] = value[token, head, d]

    return compile_kernel(write, exact=True)


def make_attend_kernel(*, head_dim: int, group: int, block_size: int, kv_heads: int, layers: int, bits: bool) -> Kernel:
    """A compiled attention of single tokens over the cache, for one geometry.

    The result is `attend(cache, blocks, first_block, lengths, query, output, layer, scale, window, softcap, begin,
    end)`:

    - `cache`: all blocks as one flat array (uint16 if `bits`, else float32);
    - `blocks`, `first_block`, `lengths`: as in `AttentionBatch`;
    - `query`, `output`: [tokens, heads, head_dim], same type as `cache`;
    - `window`: tokens seen at most; `softcap`: 0 for none (both numbers, so that one kernel serves all layers);
    - `begin`, `end`: range of tasks `token * kv_heads + kv_head`, so that threads can share the work.

    Softmax is online (Milakov and Gimelshein, 2018): one pass over the blocks, rescaling when the maximum grows.

    Args:
        head_dim: Elements of one head.
        group: Query heads that share a KV head.
        block_size: Tokens in a block.
        kv_heads: KV heads in the cache.
        layers: Layers in the cache.
        bits: Whether elements are bfloat16 bits.
    """
    half_span = block_size * head_dim
    span = 2 * half_span
    in_place = head_dim % LANES == 0 and block_size % OUTPUTS == 0
    head_stride = layers * span
    block_stride = kv_heads * head_stride
    line = _CACHE_LINE_BYTES // (2 if bits else 4)

    def attend(
        cache: Any,
        blocks: Any,
        first_block: Any,
        lengths: Any,
        query: Any,
        output: Any,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        begin: int,
        end: int,
    ) -> None:
        query_tile = np.empty((group, head_dim), np.float32)
        total = np.empty((group, head_dim), np.float32)
        tile = np.empty((block_size, head_dim), np.float32)
        scores = np.empty((group, block_size), np.float32)
        maximum = np.empty(group, np.float32)
        weight = np.empty(group, np.float32)
        for task in range(begin, end):
            token, head = task // kv_heads, task % kv_heads
            length = lengths[token]
            seen_from = max(0, length - window)
            last = (length + block_size - 1) // block_size
            table = blocks[first_block[token] : first_block[token] + last]
            here = head * head_stride + layer * span
            for g in range(group):
                for d in range(head_dim):
                    element = query[token, head * group + g, d]
                    query_tile[g, d] = (widen(element) if bits else element) * scale
                    total[g, d] = ZERO
                maximum[g], weight[g] = _MASKED, ZERO
            for b in range(seen_from // block_size, last):
                if b + 1 < last:
                    _prefetch_span(cache, table[b + 1] * block_stride + here, span, line)
                start = table[b] * block_stride + here
                valid = min(block_size, length - b * block_size)
                if in_place:
                    _score_in_place(scores, query_tile, cache, start, group, block_size, head_dim)
                else:
                    _load_tile(tile, cache[start : start + half_span], block_size, head_dim, bits)
                    _score(scores, query_tile, tile, group, block_size, head_dim)
                _cap_and_mask(scores, softcap, seen_from - b * block_size, valid, group, block_size)
                _load_tile(tile, cache[start + half_span : start + span], block_size, head_dim, bits)
                _clear_behind(tile, valid, block_size, head_dim)
                _fold(total, maximum, weight, scores, tile, group, block_size, head_dim)
            for g in range(group):
                share = ONE / weight[g]
                for d in range(head_dim):
                    result = total[g, d] * share
                    output[token, head * group + g, d] = narrow(result) if bits else result

    return compile_kernel(attend, exact=False)
