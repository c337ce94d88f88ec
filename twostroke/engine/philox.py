"""Philox 4x32-10, a counter-based random number generator.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.

The same counter and key give the same integers on every device and in any order, so a token's random numbers depend on
its request alone. Words are kept in int64 tensors, since torch has little arithmetic on unsigned types.
"""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, ...]


def philox(counter: Words, key: Words) -> Words:
    """Four random words for each counter.

    Args:
        counter: Four int64 tensors of one shape, values below 2**32.
        key: Two int64 tensors that broadcast with them, values below 2**32.

    Returns:
        Four int64 tensors, values below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(words: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the 64-bit product; it wraps in int64, which leaves its bits right."""
    product = words * multiplier
    return (product >> 32) & _WORD, product & _WORD


def random_words(seed: torch.Tensor, output_index: torch.Tensor, token_id: torch.Tensor) -> torch.Tensor:
    """One random word for each (seed, output index, token id): int64 tensors of one shape.

    The counter is (token id, output index, 0, 0), the key the seed's low and high word, and the result the first word.
    """
    zero = torch.zeros_like(token_id)
    return philox((token_id, output_index, zero, zero), (seed & _WORD, seed >> 32))[0]
