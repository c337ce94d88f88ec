"""Number formats and functions for compiled loops, inlined into the kernels that use them.

bfloat16 travels as its bits (uint16), since the compiler knows no such type; all arithmetic is in float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from twostroke.engine.compiling import Kernel

Array = npt.NDArray[Any]

ZERO, ONE = np.float32(0), np.float32(1)
_SIXTEEN = np.uint32(16)
_ROUND = np.uint32(0x7FFF)
_LOG2E = np.float32(1.4426950408889634)
_LOWEST_EXPONENT = np.float32(-126.0)
_HALF = np.float32(0.5)
# Taylor coefficients of 2**f for |f| <= 1/2; the error is below float32's own.
_C1, _C2, _C3 = np.float32(0.6931471805599453), np.float32(0.24022650695910072), np.float32(0.05550410866482158)
_C4, _C5, _C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428443), np.float32(0.00015403530393381608)
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)

# Inlined before compiling, so that the constants of a kernel are constants inside too.
inlined: Callable[[Kernel], Kernel] = njit(inline="always", fastmath=True, error_model="numpy")


@inlined
def exp_below_zero(x: Any) -> Any:
    """`exp(x)` for x <= 0, in a form that the compiler turns into vector code."""
    power = max(x * _LOG2E, _LOWEST_EXPONENT)
    whole = np.floor(power + _HALF)
    f = power - whole
    mantissa = ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return mantissa * np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)


@inlined
def widen(bits: Any) -> Any:
    """float32 of a bfloat16's bits."""
    return np.uint32(np.uint32(bits) << _SIXTEEN).view(np.float32)


@inlined
def narrow(x: Any) -> Any:
    """Bits of the bfloat16 nearest to a finite float32, ties to even."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + _ROUND + ((bits >> _SIXTEEN) & np.uint32(1))) >> _SIXTEEN)


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as a numpy array; bfloat16 as its bits, since numpy has no such type."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
