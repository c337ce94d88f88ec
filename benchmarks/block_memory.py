"""Memory cut into blocks that tell where they come from, so that a benchmark of copies can say that they are right."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.backend import BlockBuffer

_MARK = np.dtype(np.int64)
_CLEAR = -1


class BlockMemory:
    """A stretch of memory, used as blocks of any size.

    Args:
        nbytes: Size; all pages are touched.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.full(nbytes, 0x5A, np.uint8)

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self._bytes.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self._bytes.nbytes)

    def buffer(self, size: int) -> BlockBuffer:
        """The memory as blocks of `size` bytes, for a transfer agent."""
        return BlockBuffer(self.address, size, self.nbytes // size, owner=self._bytes)

    def number(self, size: int) -> None:
        """Write each block's number at both its ends."""
        for marks in self._marks(size):
            marks[:] = np.arange(len(marks))

    def clear(self, size: int) -> None:
        """Write at both ends of each block what is no block's number."""
        for marks in self._marks(size):
            marks[:] = _CLEAR

    def wrong(self, sources: Sequence[int], targets: Sequence[int], size: int) -> int:
        """How many of the blocks `targets` do not hold the numbered block of `sources` in the same place."""
        right = np.ones(len(targets), bool)
        for marks in self._marks(size):
            right &= marks[np.asarray(targets)] == np.asarray(sources)
        return int((~right).sum())

    def _marks(self, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the last eight bytes of each block, as numbers that can be written."""
        blocks = self._bytes[: self.nbytes // size * size].view(_MARK).reshape(-1, size // _MARK.itemsize)
        return blocks[:, 0], blocks[:, -1]
