"""The GPU's random integers are the CPU's, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernel_device import KERNEL_DEVICE
from twostroke.engine.kernels.random_word import random_word
from twostroke.engine.philox import random_words

TILE = 512


@triton.jit
def _store_words(words: tl.tensor, keys: tl.tensor, first: tl.tensor, tile: tl.constexpr) -> None:
    """Store the words of tokens `first .. first + tile` at the seed and output index in `keys`."""
    at = tl.arange(0, tile)
    tl.store(words + at, random_word(tl.load(keys), tl.load(keys + 1), first + at).to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, (0x299F31D0 << 32) | 0xA4093822, 2**63 - 1])
@pytest.mark.parametrize(("output_index", "first"), [(0, 0), (7, 255_488), (2**31, 131_000)])
def test_words_are_those_of_the_tensor_version(seed: int, output_index: int, first: int) -> None:
    """512 tokens each, at seeds with and without a high word, indexes beyond 31 bits, and ids up to 256 thousand."""
    words = torch.empty(TILE, dtype=torch.int64, device=KERNEL_DEVICE)
    keys = torch.tensor([seed, output_index], device=KERNEL_DEVICE)  # loaded as int64, as in a step
    _store_words[1,](words, keys, first, tile=TILE)
    tokens = torch.arange(first, first + TILE)
    expected = random_words(torch.full_like(tokens, seed), torch.full_like(tokens, output_index), tokens)
    assert torch.equal(words.cpu(), expected)
    assert int(expected.max()) >= 2**31
