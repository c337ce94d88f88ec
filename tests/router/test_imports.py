"""What the router's process must never load."""

import subprocess
import sys

FORBIDDEN = ("torch", "triton", "transformers", "ucxx", "ucp")
PROBE = f"import sys, router.main; print([name for name in {FORBIDDEN!r} if name in sys.modules])"


def test_no_engine_library_is_imported() -> None:
    """The router routes: it starts without torch, transformers or UCX."""
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
