"""Kernels of sampling and copies become binaries for Hopper, through the launches that production makes."""

import pytest

from tests.support.triton_compile import MAX_GRID, MAX_SHARED_BYTES, CompiledKernel, compile_launches

SAMPLING = {
    "_forbid_masked", "_add_values", "_penalize", "_find_maxima", "_list_candidates", "_find_least", "_draw_spans",
    "_best_of_spans",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    """Every kernel of every launch."""
    return compile_launches("tests.engine.kernels.sampling_launches")


def test_every_kernel_is_compiled(compiled: list[CompiledKernel]) -> None:
    """For a large vocabulary with many rows, and for a small one."""
    for launch in ("vocabulary 128256, 64 rows", "vocabulary 100, 1 row"):
        assert {kernel.kernel for kernel in compiled if kernel.launch == launch} == SAMPLING
    copies = [kernel.kernel for kernel in compiled if kernel.launch.startswith("copies")]
    assert copies == ["_copy_runs", "_copy_runs"]


def test_every_kernel_fits_the_device(compiled: list[CompiledKernel]) -> None:
    """Shared memory and grids are within Hopper's limits, and nothing spills out of the registers."""
    for kernel in compiled:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES, kernel
        assert all(1 <= size <= most for size, most in zip(kernel.grid, MAX_GRID, strict=True)), kernel
        assert kernel.spilled_bytes == 0, kernel
