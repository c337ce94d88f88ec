"""The random word of one token on the GPU: the very integer that `twostroke.engine.philox` computes."""

import triton
import triton.language as tl


@triton.jit
def random_word(seed: tl.tensor, output_index: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Word 0 of Philox 4x32-10 with counter (token, output index, 0, 0) and the seed's low and high word as key.

    Args:
        seed: int64 scalar, not negative.
        output_index: int64 scalar, below 2**32.
        token: int32 tensor.

    Returns:
        uint32, the shape of `token`.
    """
    counter = token.to(tl.uint32)
    zero = counter ^ counter
    word, _, _, _ = tl.philox(seed, counter, zero + output_index.to(tl.uint32), zero, zero)
    return word
