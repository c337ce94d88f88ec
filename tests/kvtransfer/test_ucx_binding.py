"""Which UCX is loaded, and that loading it says nothing that would alarm a reader of the logs."""

import subprocess
import sys

_START_UCX = """
from kvtransfer.ucp import Ucp
from kvtransfer.ucx_binding import load_ucp
ucp = Ucp(load_ucp())
context = ucp.create_context({"TLS": "tcp,self"})
worker = ucp.create_worker(context)
ucp.destroy_worker(worker)
ucp.destroy_context(context)
"""


def test_ucx_starts_without_warnings() -> None:
    """The binding sets a variable of UCX after loading it, which UCX would report as unused in every worker's log."""
    done = subprocess.run([sys.executable, "-c", _START_UCX], capture_output=True, text=True, check=True, timeout=60)
    assert "WARN" not in done.stdout + done.stderr


def test_the_libraries_alone_are_enough() -> None:
    """Where neither binding is installed but UCX itself is, as its wheel brings it."""
    hidden = "import sys; sys.modules.update(ucxx=None, ucp=None)\nimport importlib.util as u; real = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *rest: None if name in ('ucxx', 'ucp') else real(name, *rest)\n"
    subprocess.run([sys.executable, "-c", hidden + _START_UCX], capture_output=True, text=True, check=True, timeout=60)
