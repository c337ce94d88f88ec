"""Keeps a number of requests running (closed loop), or sends each when it is due (open loop).

Records stand in the list from the moment when their request is due, so that a run that is stopped loses nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.workload import Work

MAX_IN_FLIGHT = 4096
"""Requests of an open loop at the same time at most; one that is due beyond that counts as failed."""

Send = Callable[[Work, RequestRecord], Awaitable[None]]


async def closed_loop(
    works: Iterator[Work], send: Send, concurrency: int, records: list[RequestRecord], duration_s: float | None = None
) -> None:
    """Keep `concurrency` requests running until `works` end or, with `duration_s`, no longer start any."""
    begun = time.monotonic()

    async def client() -> None:
        for work in works:
            now = time.monotonic()
            if duration_s is not None and now - begun >= duration_s:
                return
            record = RequestRecord(now)
            records.append(record)
            await send(work, record)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())


async def open_loop(
    works: Iterator[Work], send: Send, records: list[RequestRecord], duration_s: float | None = None
) -> None:
    """Send each request when it is due, however many run already; wait for the last ones."""
    begun = time.monotonic()
    running: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        for work in works:
            due_s = work.due_s or 0.0
            if duration_s is not None and due_s >= duration_s:
                return
            await asyncio.sleep(max(0.0, begun + due_s - time.monotonic()))
            record = RequestRecord(begun + due_s)
            records.append(record)
            if len(running) >= MAX_IN_FLIGHT:
                record.error, record.ended = "not sent: too many in flight", time.monotonic()
                continue
            task = group.create_task(_send(send, work, record))
            running.add(task)
            task.add_done_callback(running.discard)


async def _send(send: Send, work: Work, record: RequestRecord) -> None:
    await send(work, record)
