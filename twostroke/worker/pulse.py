"""What other threads may know of the engine thread: when it last went round, and how busy it is.

The engine thread writes, others read. Each attribute is replaced as a whole, so a reader sees the old value or the new.
"""

import time
from collections.abc import Callable

from twostroke.protocol.worker import WorkerLoad


class Pulse:
    """The engine loop's sign of life.

    Args:
        clock: Seconds on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since: float | None = clock()  # None while the loop waits for work
        self.load = WorkerLoad()

    def beat(self, load: WorkerLoad) -> None:
        """The loop went round; `load` is how it stands now."""
        self.load = load
        self._busy_since = self._clock()

    def rest(self) -> None:
        """The loop waits for work: it is healthy for as long as that lasts."""
        self._busy_since = None

    def resume(self) -> None:
        """The loop has something to do again."""
        self._busy_since = self._clock()

    @property
    def age_s(self) -> float:
        """Seconds since the loop last went round; 0 while it waits for work."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock() - since)
