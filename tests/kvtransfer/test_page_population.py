"""Pages of a cache are there before anyone writes them, and hold what they held."""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.backend import BlockBuffer, MemoryKind
from kvtransfer.page_population import PagePopulation

SIZE = 16 << 20


@pytest.fixture
def pages() -> Iterator[mmap.mmap]:
    """Fresh memory that nobody has touched, in small pages."""
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh.madvise(mmap.MADV_NOHUGEPAGE)
        yield fresh


def buffer_of(pages: mmap.mmap, skipped: int = 0, kind: MemoryKind = MemoryKind.HOST) -> BlockBuffer:
    """All of `pages` but the first `skipped` bytes, as blocks of 1 KiB."""
    view = (ctypes.c_char * 0).from_buffer(pages)
    address = ctypes.addressof(view)
    del view
    return BlockBuffer(address + skipped, 1 << 10, (SIZE - skipped) >> 10, owner=pages, kind=kind)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_all_pages_come_slice_by_slice(pages: mmap.mmap) -> None:
    """Eight slices of 2 MiB, nine if they lie across them; afterwards the memory is there."""
    population = PagePopulation(buffer_of(pages))
    before = resident()
    slices = sum(iter(population.advance, False))
    assert slices in (8, 9)
    assert resident() - before > SIZE * 0.9
    assert not population.advance()


def test_content_stays_and_odd_edges_are_left_alone(pages: mmap.mmap) -> None:
    """A buffer that begins within a page is populated from the next one on."""
    pages[:4] = b"left"
    pages[5000:5005] = b"alone"
    population = PagePopulation(buffer_of(pages, skipped=1 << 10))
    while population.advance():
        pass
    assert pages[:4] == b"left"
    assert pages[5000:5005] == b"alone"


def test_memory_of_a_device_is_not_touched(pages: mmap.mmap) -> None:
    """The host's kernel knows nothing of it."""
    assert not PagePopulation(buffer_of(pages, kind=MemoryKind.CUDA)).advance()


def test_memory_that_the_kernel_refuses_is_given_up(pages: mmap.mmap) -> None:
    """An address that is not mapped: one try, and no more."""
    del pages
    population = PagePopulation(BlockBuffer(1 << 12, 1 << 12, 4, owner=None))
    assert population.advance()
    assert not population.advance()
