"""Compiles loops for the CPU, and keeps the machine code on disk."""

from collections.abc import Callable
from typing import Any

from numba import njit

Kernel = Callable[..., Any]


def compile_kernel(function: Kernel, *, exact: bool) -> Kernel:
    """Compile `function` on its first call; the GIL is free while it runs.

    The machine code is kept beside the source, or in the user's cache (NUMBA_CACHE_DIR replaces both); where nothing is
    writable, every process compiles for itself.

    Args:
        function: In the subset of Python that numba compiles.
        exact: Keep the order of floating-point operations, and infinities; otherwise sums are reordered for speed, and
            the function must never meet an infinity.
    """
    try:
        compiled: Kernel = njit(cache=True, fastmath=not exact, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no writable place
        compiled = njit(fastmath=not exact, nogil=True, error_model="numpy")(function)
    return compiled
