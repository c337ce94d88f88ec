"""Matrix products of few rows with bfloat16 weights, for processors without instructions for them.

Torch's own loops for that type use no vector instructions there. Here each weight is widened to float32 in a register,
once for up to three rows of input; inputs, sums and results are float32. Weights are read where they lie.
"""

# ruff: noqa: PLR0917 - compiled functions take plain arrays and numbers, not objects

from typing import Any

from twostroke.engine.compiled_dots import OUTPUTS, dots_of_1, dots_of_2, dots_of_3
from twostroke.engine.compiling import Kernel, compile_kernel


def _multiply(weights: Any, inputs: Any, results: Any, length: int, outputs: int, begin: int, end: int) -> None:
    """See `make_multiply_kernel`."""
    rows = inputs.shape[0] // length
    for n in range(begin, end, OUTPUTS):
        row = 0
        while row + 3 <= rows:
            dots_of_3(weights, n * length, inputs, row * length, results, row * outputs + n, length, outputs)
            row += 3
        if row + 2 == rows:
            dots_of_2(weights, n * length, inputs, row * length, results, row * outputs + n, length, outputs)
        elif row + 1 == rows:
            dots_of_1(weights, n * length, inputs, row * length, results, row * outputs + n, length, outputs)


def make_multiply_kernel() -> Kernel:
    """A compiled `multiply(weights, inputs, results, length, outputs, begin, end)`.

    Args of the kernel, all arrays flat:
        weights: bfloat16 bits [outputs, length].
        inputs: float32 [rows, length].
        results: float32 [rows, outputs]; columns `begin .. end` are written.
    """
    return compile_kernel(_multiply, exact=True)
