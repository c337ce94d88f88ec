"""Holds for all tests: Triton kernels run under Triton's interpreter, on the CPU.

Triton reads the variable when it is imported, and more than one library imports it, so it is set before any of them.
`TRITON_INTERPRET=0` runs the kernels on a GPU instead.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
