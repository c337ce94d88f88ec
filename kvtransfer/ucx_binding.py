"""Which Python package brings UCX: ucxx, its predecessor ucx-py, or the libraries alone (libucx, which ucxx brings).

The first two load `libucp` on import, the last one when told to. The one-sided calls are made on that very copy, found
by its soname. (By path a second copy would be loaded, and the two would fight over sockets and signals.)
"""

import ctypes
import importlib
import importlib.util
import os

import structlog

from kvtransfer.backend import BackendError

log = structlog.get_logger(__name__)

_SONAME = "libucp.so.0"
_LIBRARIES_ALONE = "libucx"
_MEMORY_TYPE_CACHE = ("UCX_MEMTYPE_CACHE", "n")
"""What ucxx sets too, but only after it has loaded UCX, which then warns of an unused variable."""
BINDINGS = (("ucxx", "ucxx"), ("ucp", "ucx-py"), ("libucx", "libucx"))
"""Module and package, best first."""


def choose_binding() -> str:
    """The module of the best binding that is installed.

    Raises:
        BackendError: There is none; names the packages to install.
    """
    for module, _ in BINDINGS:
        if importlib.util.find_spec(module) is not None:
            return module
    raise BackendError(
        "no UCX binding is installed: install ucxx-cu13 (or ucxx-cu12), or ucx-py from NVIDIA's package index, "
        "or set transfer.backend to loopback where both roles share a process"
    )


def load_ucp() -> ctypes.CDLL:
    """The `libucp` that the chosen binding has loaded.

    Raises:
        BackendError: No binding is installed, or it cannot be imported or did not load UCX.
    """
    module = choose_binding()
    log.info("ucx binding chosen", package=dict(BINDINGS)[module])
    os.environ.setdefault(*_MEMORY_TYPE_CACHE)
    try:
        imported = importlib.import_module(module)
        if module == _LIBRARIES_ALONE:
            imported.load_library()
        return ctypes.CDLL(_SONAME)
    except (ImportError, OSError) as error:
        raise BackendError(f"the UCX binding {module} is installed but does not load: {error}") from error
