"""Gets the pages of a host's KV cache from the kernel before a peer writes them.

A cache is mapped, not touched, when a worker starts. The first write into each of its pages then waits for the kernel
to find and clear one, which made transfers into a new cache three to five times as long. The transfer thread does that
work ahead, slice by slice, while nothing is leased or fetched: starting does not wait for it, and neither does a
transfer for longer than a slice takes.
"""

import ctypes
import mmap

import structlog

from kvtransfer.backend import BlockBuffer, MemoryKind

log = structlog.get_logger(__name__)

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, Linux 5.14; it changes no content."""
_SLICE_BYTES = 2 << 20
"""A huge page; takes up to a few milliseconds."""


class PagePopulation:
    """How far the pages of one buffer are populated.

    Args:
        buffer: The cache; nothing is to be done for one that lies on a device.
    """

    def __init__(self, buffer: BlockBuffer) -> None:
        page = mmap.PAGESIZE
        self._next = -(-buffer.address // page) * page
        self._end = (buffer.address + buffer.nbytes) // page * page if buffer.kind is MemoryKind.HOST else 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def advance(self) -> bool:
        """Populate one slice; False if there was none left."""
        if self._next >= self._end:
            return False
        slice_end = min(self._end, (self._next // _SLICE_BYTES + 1) * _SLICE_BYTES)
        if self._libc.madvise(self._next, slice_end - self._next, _POPULATE_WRITE):
            # An old kernel, or no memory left: pages come when they are written, as they would without this.
            log.info("the cache's pages come as they are written", errno=ctypes.get_errno())
            slice_end = self._end
        self._next = slice_end
        return True
