"""Waits for what has no event of its own."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until `condition()` holds.

    Raises:
        TimeoutError: It does not within `within_s`.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the conditions are about objects that have no events
            await asyncio.sleep(0.005)
