"""Holds for all tests: Triton kernels run under Triton's interpreter, on the CPU.

Triton reads the variable when it is imported, and more than one library imports it, so it is set before any of them.
Compiling needs a process without it: see `tests/support/triton_compile.py`.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
