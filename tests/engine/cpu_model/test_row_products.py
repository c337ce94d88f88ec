"""The compiled matrix product of bfloat16 weights and float32 rows, against torch in double precision."""

import pytest
import torch

from twostroke.engine.compiled_numbers import as_array
from twostroke.engine.cpu_model.plain_decoder import Projection
from twostroke.engine.cpu_model.products import MANY_ROWS, Rows, WideningProducts, choose_products, library_product
from twostroke.engine.cpu_model.row_products import make_multiply_kernel
from twostroke.engine.sharing import Team


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7])
def test_products_are_torchs(rows: int) -> None:
    """Every number of rows that the loop treats in its own way, with an odd number of vectors in a row."""
    torch.manual_seed(rows)
    weight, inputs = torch.randn(12, 40).bfloat16(), torch.randn(rows, 40)
    result = torch.full((rows, 12), float("nan"))
    make_multiply_kernel()(
        as_array(weight.view(-1)), as_array(inputs.view(-1)), as_array(result.view(-1)), 40, 12, 0, 12
    )
    expected = inputs.double() @ weight.double().T
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)


def test_a_range_of_outputs_leaves_the_others_alone() -> None:
    """Threads share a product by its outputs."""
    weight, inputs = torch.randn(12, 8).bfloat16(), torch.randn(2, 8)
    result = torch.zeros(2, 12)
    make_multiply_kernel()(as_array(weight.view(-1)), as_array(inputs.view(-1)), as_array(result.view(-1)), 8, 12, 4, 8)
    assert not result[:, :4].any()
    assert not result[:, 8:].any()
    assert torch.allclose(result[:, 4:8], (inputs @ weight.float().T)[:, 4:8], atol=1e-5)


@pytest.mark.parametrize("rows", [3, MANY_ROWS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_and_many_rows_with_and_without_bias(rows: int, threads: int, *, biased: bool) -> None:
    """The ways of `WideningProducts`, and torch's own for float32, agree."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(64, 16).bfloat16(), torch.randn(64).bfloat16() if biased else None
    inputs, ours, theirs = Rows(torch.randn(rows, 16)), *(Rows.empty(rows, 64, torch.float32) for _ in range(2))
    WideningProducts(Team(threads)).make(Projection(weight, bias))(inputs, ours)
    library_product(Projection(weight.float(), None if bias is None else bias.float()))(inputs, theirs)
    assert torch.allclose(ours.tensor, theirs.tensor, atol=1e-5)


def test_odd_sizes_and_float32_go_through_torch() -> None:
    """The loop takes inputs in vectors and outputs in fours; rows then keep the weights' type."""
    odd = Projection(torch.randn(10, 16).bfloat16(), None)
    assert choose_products(torch.bfloat16, [odd], Team(1)).dtype is torch.bfloat16
    assert choose_products(torch.float32, [Projection(torch.randn(8, 8), None)], Team(1)).dtype is torch.float32
