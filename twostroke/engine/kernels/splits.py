"""How the context of a decoding token is split over programs.

One rule for all: the size of a split depends on what that token sees and on nothing else. So a token's result does not
depend on its batch, and the grid needs only a bound, which a captured graph can fix.
"""

import triton
import triton.language as tl

SPLIT_TOKENS = 256
"""Tokens of a split, as long as there are fewer than `MAX_SPLITS` of them."""
MAX_SPLITS = 64
"""Splits of a token at most; enough to fill a GPU with one sequence and two KV heads."""


def count_splits(visible: int) -> int:
    """Splits that a grid needs for tokens that see up to `visible` tokens."""
    return max(1, min(MAX_SPLITS, -(-visible // SPLIT_TOKENS)))


@triton.jit
def split_tokens(visible: tl.tensor, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr) -> tl.tensor:
    """Tokens in each split of a token that sees `visible` tokens."""
    return tl.maximum(SPLIT_TOKENS, tl.cdiv(tl.cdiv(visible, MAX_SPLITS), 64) * 64)
