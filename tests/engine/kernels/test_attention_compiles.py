"""The attention kernels become binaries for Hopper that fit it, without a GPU."""

import pytest

from tests.support.triton_compile import MAX_GRID, MAX_SHARED_BYTES, CompiledKernel, compile_launches

LAUNCHES = "tests.engine.kernels.attention_launches"
MATRIX_KERNELS = {"decode_attention_kernel", "prefill_attention_kernel"}
KERNELS = MATRIX_KERNELS | {"write_kv_kernel", "combine_splits_kernel"}


@pytest.mark.timeout(300)
def test_each_kernel_fits_the_gpu_and_uses_its_matrix_units() -> None:
    """In the forms that differ most; the usual ones keep all in registers."""
    compiled = compile_launches(LAUNCHES, deadline=280)
    assert {kernel.kernel for kernel in compiled} == KERNELS
    for kernel in compiled:
        check_fits(kernel)
        assert kernel.spilled_bytes == 0 or "exact" in kernel.launch, kernel


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_dtype_and_head_size_fits_the_gpu() -> None:
    """Shared memory above all: a launch that asks for too much fails on the GPU only."""
    compiled = compile_launches(LAUNCHES, "all", deadline=880)
    assert {kernel.kernel for kernel in compiled} == KERNELS
    for kernel in compiled:
        check_fits(kernel)


def check_fits(kernel: CompiledKernel) -> None:
    """A launch of it would be accepted."""
    assert kernel.shared_bytes <= MAX_SHARED_BYTES, kernel
    assert all(count <= most for count, most in zip(kernel.grid, MAX_GRID, strict=True)), kernel
    assert kernel.matrix_units == (kernel.kernel in MATRIX_KERNELS), kernel
