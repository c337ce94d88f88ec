"""Arithmetic of attention kernels: scores in powers of two, and softmax over tiles of keys that come one by one.

A row of queries carries three values from tile to tile: `peak`, its highest score so far; `total`, the sum of its
weights relative to that; `output`, its weighted sum of values likewise. `output / total` is the result.
"""

import math

import torch
import triton
import triton.language as tl

from twostroke.engine.attention.contract import AttentionForm

_LOG2_E = math.log2(math.e)


def score_factors(form: AttentionForm) -> tuple[float, float]:
    """The factors `inner` and `outer` of `scores_of`."""
    if form.softcap is None:
        return form.scale * _LOG2_E, 0.0
    return 2 * form.scale * _LOG2_E / form.softcap, form.softcap * _LOG2_E


def upcasts(dtype: torch.dtype) -> bool:
    """Whether matrix products of `dtype` need float32 operands: the interpreter's product of bfloat16 is wrong."""
    return dtype is torch.bfloat16 and bool(triton.knobs.runtime.interpret)


@triton.jit
def multiply(left: tl.tensor, right: tl.tensor, onto: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """`onto + left @ right`, summed in float32; float32 operands as three products of their halves, nearly exact."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, onto, input_precision="tf32x3")


@triton.jit
def scores_of(products: tl.tensor, inner: tl.tensor, outer: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores times log2(e), so that `exp2` gives their weights.

    Without a soft cap `inner` is scale * log2(e). With one, tanh(x) is 1 - 2 / (e^2x + 1), which overflows to the
    right limits; `inner` turns a product into log2(e) * 2x and `outer` is softcap * log2(e).
    """
    if SOFTCAP:
        return outer - 2.0 * outer / (tl.exp2(products * inner) + 1.0)
    else:  # noqa: RET505 - a compiled branch: Triton drops the other one
        return products * inner


@triton.jit
def rescale(peak: tl.tensor, scores: tl.tensor) -> tl.tensor:
    """The new peak, the weights of `scores`, and the factor that makes older sums relative to the new peak.

    A row that saw no key so far has a peak of minus infinity; its weights are 0, not NaN.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
