"""One clock for all running requests."""

import asyncio

from tests.support.waiting import until
from twostroke.frontend.watch import Watch

PERIOD_S = 0.005


class Counting:
    """Counts its ticks.

    Args:
        broken: Raises at each one.
    """

    def __init__(self, *, broken: bool = False) -> None:
        self.ticks: list[float] = []
        self._broken = broken

    def tick(self, now_s: float) -> None:
        """See `Watched`."""
        self.ticks.append(now_s)
        if self._broken:
            raise ValueError("broken")


async def test_all_are_looked_at_until_they_are_removed() -> None:
    """In the loop's own time; a request that ended is left alone."""
    watch = Watch(PERIOD_S)
    first, second = Counting(), Counting()
    watch.add(first)
    watch.add(second)
    await until(lambda: len(first.ticks) >= 2)
    assert first.ticks == second.ticks
    assert first.ticks[-1] <= asyncio.get_running_loop().time()
    watch.remove(first)
    seen = len(first.ticks)
    await until(lambda: len(second.ticks) >= seen + 2)
    assert len(first.ticks) == seen


async def test_one_that_breaks_does_not_keep_others_from_being_looked_at() -> None:
    """It is logged, and looked at again as well."""
    watch = Watch(PERIOD_S)
    broken, sound = Counting(broken=True), Counting()
    watch.add(broken)
    watch.add(sound)
    await until(lambda: len(sound.ticks) >= 3)
    assert len(broken.ticks) >= 3


async def test_it_begins_anew_after_it_had_nothing_to_watch() -> None:
    """An idle frontend wakes for nothing."""
    watch = Watch(PERIOD_S)
    first, second = Counting(), Counting()
    watch.add(first)
    watch.remove(first)
    watch.remove(first)
    await asyncio.sleep(3 * PERIOD_S)
    assert first.ticks == []
    watch.add(second)
    await until(lambda: bool(second.ticks))
