"""Threads that share the work of one compiled kernel: its range of tasks is cut into parts.

The kernels release the interpreter lock. Numba's own threads are not used: they are not safe with two engines in one
process.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_PARTS_PER_THREAD = 4


class Team:
    """Some threads, started when they are first needed.

    Args:
        threads: How many.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "kernel") if threads > 1 else None

    def share(self, tasks: int, run: Callable[[int, int], object], step: int = 1) -> None:
        """Call `run(begin, end)` for parts that cover `0 .. tasks`, and wait for all of them.

        Args:
            tasks: End of the range; a multiple of `step`.
            run: Runs one part; on this thread if one part is all.
            step: Parts begin and end at multiples of it.
        """
        part = -(-tasks // (self._threads * _PARTS_PER_THREAD * step)) * step
        if self._pool is None or part >= tasks:
            run(0, tasks)
            return
        begins = range(0, tasks, part)
        for _ in self._pool.map(run, begins, [min(begin + part, tasks) for begin in begins]):
            pass
