"""Looks at every running request now and then, with one timer for all of them.

Whatever may end a request or must happen in its silence (its deadline, a client that stalls, comments in a silent
stream) is seen at the next tick. A timer for each purpose and request would cost more than all of the looking.
"""

import asyncio
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

TICK_S = 0.1


class Watched(Protocol):
    """Something that wants to be looked at."""

    def tick(self, now_s: float) -> None:
        """See what is due; `now_s` is the loop's clock."""
        ...


class Watch:
    """Calls `tick` of all that it watches. Used on one event loop; sleeps while it watches nothing.

    Args:
        period_s: Between two ticks.
    """

    def __init__(self, period_s: float = TICK_S) -> None:
        self._period_s = period_s
        self._watched: dict[Watched, None] = {}
        self._ticking = False

    def add(self, watched: Watched) -> None:
        """Watch it, until `remove`."""
        self._watched[watched] = None
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def remove(self, watched: Watched) -> None:
        """Watch it no longer."""
        self._watched.pop(watched, None)

    def _tick(self) -> None:
        self._ticking = bool(self._watched)
        if not self._ticking:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._period_s, self._tick)
        now_s = loop.time()
        for watched in list(self._watched):
            try:
                watched.tick(now_s)
            except Exception:
                log.exception("a watched request broke")  # the others are still to be looked at
