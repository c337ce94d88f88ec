"""The frontend serves without the libraries that only workers need: they cost seconds and hundreds of megabytes."""

import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "ucxx", "ucp", "numba", "numpy")


def test_a_frontend_never_loads_the_heavy_libraries() -> None:
    """Everything that `twostroke serve`'s HTTP process imports, in a fresh interpreter."""
    program = (
        "import sys, twostroke.frontend.serve, twostroke.frontend.app; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
