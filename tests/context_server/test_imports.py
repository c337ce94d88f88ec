"""The HTTP processes of the role servers stay small: they never load what only their worlds need."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "numba", "ucxx")


@pytest.mark.parametrize("module", ["context_server.main", "generation_server.main", "twostroke"])
def test_the_http_process_loads_no_model_library(module: str) -> None:
    """Importing the server's entry point leaves torch, transformers, triton, numba and ucxx alone."""
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"
