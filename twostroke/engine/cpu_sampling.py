"""Gumbel-max for logits in CPU memory, compiled: the same tokens as the tensor version, an order of magnitude sooner.

Random words of a run of tokens are computed in vector code. A logarithm is taken only where the word could win: the
noise of a word is at most `-ln(-ln u) <= -ln(1 - u)`, and the exponent of `1 - u` bounds that from above.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from twostroke.engine.compiling import Kernel, compile_kernel

_RUN = 1024
_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LN2 = math.log(2.0) * (1 + 1e-12)
_HIGHEST_NOISE = 22.9


@njit(inline="always", error_model="numpy")
def _random_words(counters: Any, start: Any, index: Any, seed: Any) -> Any:
    """Words of tokens `start .. start + _RUN` (see `philox`); a round takes all tokens at once, in vector code."""
    c0, c1, c2, c3 = counters[0], counters[1], counters[2], counters[3]
    for i in range(_RUN):
        c0[i], c1[i], c2[i], c3[i] = np.uint64(start + i), np.uint64(index), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & _WORD, np.uint64(seed) >> _SHIFT
    for _ in range(10):
        for i in range(_RUN):
            # The masks tell the compiler that 32-bit multiplication will do.
            product0, product1 = (c0[i] & _WORD) * _MULTIPLIER_0, (c2[i] & _WORD) * _MULTIPLIER_1
            c0[i], c1[i] = (product1 >> _SHIFT) ^ c1[i] ^ k0, product1 & _WORD
            c2[i], c3[i] = (product0 >> _SHIFT) ^ c3[i] ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEP_0) & _WORD, (k1 + _KEY_STEP_1) & _WORD
    return c0


def _choose(logits: Any, seeds: Any, indexes: Any, chosen: Any) -> None:
    """`chosen[row]` becomes the token with the highest noisy logit of `logits[row]`, the lowest id of equals."""
    counters = np.empty((4, _RUN), np.uint64)
    for row in range(logits.shape[0]):
        best = -np.inf
        highest = logits[row].max()
        for start in range(0, logits.shape[1], _RUN):
            count = min(_RUN, logits.shape[1] - start)
            words = _random_words(counters, start, indexes[row], seeds[row])
            for i in range(count):
                logit = np.float64(logits[row, start + i])
                # Below both bounds the token cannot win; the second one also drops forbidden tokens (-inf) at once.
                if logit + _HIGHEST_NOISE <= best or logit < highest - 27.0:
                    continue
                below_top = np.float64(_WORD - words[i]) + 0.5  # 2**32 * (1 - u), exactly
                exponent = (np.float64(below_top).view(np.int64) >> 52) - 1023
                if logit + (32 - exponent) * _LN2 <= best:
                    continue
                uniform = (np.float64(words[i]) + 0.5) / 4294967296.0
                noisy = logit - math.log(-math.log(uniform))
                if noisy > best:
                    best = noisy
                    chosen[row] = start + i


class CpuGumbelMax:
    """The compiled chooser; one for each runner."""

    def __init__(self) -> None:
        self._choose: Kernel = compile_kernel(_choose, exact=True)

    def __call__(self, logits: torch.Tensor, seeds: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
        """Tokens [rows], as from `sampler.gumbel_max`."""
        chosen = torch.zeros(len(logits), dtype=torch.int64)
        self._choose(logits.numpy(), seeds.numpy(), indexes.numpy(), chosen.numpy())
        return chosen
