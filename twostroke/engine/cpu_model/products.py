"""Matrix products of a step's rows with one weight, in the way that suits the processor.

Torch multiplies float32 well everywhere, and bfloat16 where the processor has instructions that its library uses. On
others (x86 with AVX2 alone) a bfloat16 weight meets float32 rows instead: a few rows in a compiled loop
(`row_products`), many through torch, on weights that are widened part by part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.engine.compiled_dots import LANES, OUTPUTS
from twostroke.engine.compiled_numbers import Array, as_array
from twostroke.engine.compiling import Kernel
from twostroke.engine.cpu_model.plain_decoder import Projection
from twostroke.engine.cpu_model.row_products import make_multiply_kernel
from twostroke.engine.processor import multiplies_bfloat16
from twostroke.engine.sharing import Team

MANY_ROWS = 48
"""From so many rows on, widening a weight once and using torch is faster than the compiled loop (measured)."""
_WIDENED_ELEMENTS = 1 << 20


class Rows:
    """Memory for one row of values for each token of a step, as torch and as compiled loops see it.

    Attributes:
        tensor: [rows, width].
        array: The same, flat; bfloat16 as bits.
    """

    __slots__ = ("array", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.array: Array = as_array(tensor.view(-1))

    @classmethod
    def empty(cls, rows: int, width: int, dtype: torch.dtype) -> "Rows":
        """Memory with anything in it."""
        return cls(torch.empty(rows, width, dtype=dtype))


Product = Callable[[Rows, Rows], None]
"""`product(rows, result)`: `result = rows @ weight.T + bias`."""


@dataclass(frozen=True, slots=True)
class ProductMaker:
    """How the products of a model are computed.

    Attributes:
        dtype: Of the rows between them.
        make: Makes the product of one projection.
    """

    dtype: torch.dtype
    make: Callable[[Projection], Product]


def choose_products(dtype: torch.dtype, projections: list[Projection], team: Team) -> ProductMaker:
    """The best way for weights of `dtype` on this processor.

    Args:
        dtype: float32 or bfloat16.
        projections: All that will be made; odd sizes go through torch.
        team: Shares the compiled loops.
    """
    odd = any(one.weight.shape[0] % OUTPUTS or one.weight.shape[1] % LANES for one in projections)
    if dtype is not torch.bfloat16 or odd or multiplies_bfloat16():
        return ProductMaker(dtype, library_product)
    widening = WideningProducts(team)
    return ProductMaker(torch.float32, widening.make)


def library_product(projection: Projection) -> Product:
    """Through torch; rows and weight have one type."""
    weight, bias = projection.weight.T, projection.bias

    def multiply(rows: Rows, result: Rows) -> None:
        if bias is None:
            torch.mm(rows.tensor, weight, out=result.tensor)
        else:
            torch.addmm(bias, rows.tensor, weight, out=result.tensor)

    return multiply


class WideningProducts:
    """bfloat16 weights with float32 rows.

    Args:
        team: Shares the compiled loops.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._kernel: Kernel = make_multiply_kernel()

    def make(self, projection: Projection) -> Product:
        """The product of one projection."""
        outputs, inputs = projection.weight.shape
        weight = as_array(projection.weight.view(-1))
        bias = None if projection.bias is None else projection.bias.float()

        def multiply(rows: Rows, result: Rows) -> None:
            if len(rows.tensor) >= MANY_ROWS:
                _multiply_widened(projection.weight, rows.tensor, result.tensor)
            else:

                def run(begin: int, end: int) -> None:
                    self._kernel(weight, rows.array, result.array, inputs, outputs, begin, end)

                self._team.share(outputs, run, OUTPUTS)
            if bias is not None:
                result.tensor.add_(bias)

        return multiply


def _multiply_widened(weight: torch.Tensor, rows: torch.Tensor, result: torch.Tensor) -> None:
    """Through torch in float32, over parts of the weight that stay in the processor's cache when widened."""
    outputs = max(OUTPUTS, _WIDENED_ELEMENTS // weight.shape[1])
    for begin in range(0, len(weight), outputs):
        part = weight[begin : begin + outputs].float()
        if len(part) == len(weight):
            torch.mm(rows, part.T, out=result)
        else:
            result[:, begin : begin + outputs] = rows @ part.T
