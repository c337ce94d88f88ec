"""Compiled loops between the matrix products of a decoder layer: residual sum and norm, rotation, gated activation.

One call does what takes the library five to ten tensor operations. Each row is computed by itself, in float32; where
values are bfloat16, they are rounded where the library's layers round them. Arrays are flat; kernels take a range of
rows `begin .. end`, so that threads can share them.
"""

# ruff: noqa: PLR0917 - compiled functions take plain arrays and numbers, not objects

from typing import Any

import numpy as np

from twostroke.engine.compiled_numbers import ONE, ZERO, exp_below_zero, inlined, narrow, widen
from twostroke.engine.compiling import Kernel, compile_kernel


@inlined
def _read(values: Any, place: Any, bits: bool) -> Any:  # noqa: FBT001 - a constant of the kernel
    return widen(values[place]) if bits else values[place]


@inlined
def _rounded(x: Any, bits: bool) -> Any:  # noqa: FBT001 - a constant of the kernel
    """`x` as it would be after a visit to memory."""
    return widen(narrow(x)) if bits else x


def make_add_norm_kernel(*, bits: bool) -> Kernel:
    """A compiled `add_norm(residual, added, weight, epsilon, normed, width, begin, end)`.

    `residual += added`, then `normed = weight * residual / rms(residual)`. `residual`, `added` and `normed` are
    [rows, width]; `weight` is float32 [width].

    Args:
        bits: Whether rows are bfloat16 bits, else float32.
    """

    def add_norm(
        residual: Any, added: Any, weight: Any, epsilon: float, normed: Any, width: int, begin: int, end: int
    ) -> None:
        row = np.empty(width, np.float32)
        for start in range(begin * width, end * width, width):
            squares = ZERO
            for i in range(width):
                x = _rounded(_read(residual, start + i, bits) + _read(added, start + i, bits), bits)
                row[i] = x
                squares += x * x
            factor = ONE / np.sqrt(squares / np.float32(width) + epsilon)
            for i in range(width):
                result = _rounded(row[i] * factor, bits) * weight[i]
                residual[start + i] = narrow(row[i]) if bits else row[i]
                normed[start + i] = narrow(result) if bits else result

    return compile_kernel(add_norm, exact=False)


def make_gate_kernel(*, bits: bool) -> Kernel:
    """A compiled `gate(both, gated, width, begin, end)`: `gated = silu(both[:, :width]) * both[:, width:]`.

    `both` is [rows, 2 * width], `gated` [rows, width].

    Args:
        bits: Whether rows are bfloat16 bits, else float32.
    """

    def gate(both: Any, gated: Any, width: int, begin: int, end: int) -> None:
        for row in range(begin, end):
            first, second, target = row * 2 * width, row * 2 * width + width, row * width
            for i in range(width):
                x = _read(both, first + i, bits)
                small = exp_below_zero(-abs(x))
                silu = x * (ONE if x > ZERO else small) / (ONE + small)
                result = _rounded(silu, bits) * _read(both, second + i, bits)
                gated[target + i] = narrow(result) if bits else result

    return compile_kernel(gate, exact=False)


def make_rotate_kernel(
    *, heads: int, kv_heads: int, head_dim: int, norms: bool, bits: bool, cache_bits: bool
) -> Kernel:
    """A compiled `rotate(joined, cosines, sines, norm_weights, epsilon, query, key, value, begin, end)`.

    It takes query, key and value of each token apart and turns the first two by their position (RoPE, with the halves
    of a head as pairs). `joined` is [tokens, (heads + 2 * kv_heads) * head_dim]; `cosines` and `sines` are float32
    [tokens, head_dim]; `norm_weights` float32 [2, head_dim]: of query and key; `query` is [tokens, heads, head_dim],
    `key` and `value` [tokens, kv_heads, head_dim].

    Args:
        heads: Query heads.
        kv_heads: Heads of key and value.
        head_dim: Elements of a head; even.
        norms: Whether query and key heads are normed before they are turned.
        bits: Whether `joined` is bfloat16 bits, else float32.
        cache_bits: Likewise of `query`, `key` and `value`.
    """
    half = head_dim // 2
    width = (heads + 2 * kv_heads) * head_dim

    def rotate(
        joined: Any,
        cosines: Any,
        sines: Any,
        norm_weights: Any,
        epsilon: float,
        query: Any,
        key: Any,
        value: Any,
        begin: int,
        end: int,
    ) -> None:
        head_row = np.empty(head_dim, np.float32)
        for token in range(begin, end):
            turn = token * head_dim
            for head in range(heads + kv_heads):
                start = token * width + head * head_dim
                squares = ZERO
                for i in range(head_dim):
                    x = _read(joined, start + i, bits)
                    head_row[i] = x
                    squares += x * x
                if norms:
                    own = 0 if head < heads else head_dim
                    factor = ONE / np.sqrt(squares / np.float32(head_dim) + epsilon)
                    for i in range(head_dim):
                        head_row[i] = _rounded(_rounded(head_row[i] * factor, bits) * norm_weights[own + i], bits)
                target = (token * heads + head) * head_dim
                turned = query
                if head >= heads:
                    target = (token * kv_heads + head - heads) * head_dim
                    turned = key
                for i in range(half):
                    low, high = head_row[i], head_row[half + i]
                    new_low = low * cosines[turn + i] - high * sines[turn + i]
                    new_high = high * cosines[turn + half + i] + low * sines[turn + half + i]
                    turned[target + i] = narrow(new_low) if cache_bits else new_low
                    turned[target + half + i] = narrow(new_high) if cache_bits else new_high
            start, target = token * width + (heads + kv_heads) * head_dim, token * kv_heads * head_dim
            for i in range(kv_heads * head_dim):
                x = _read(joined, start + i, bits)
                value[target + i] = narrow(x) if cache_bits else x

    return compile_kernel(rotate, exact=False)
