"""One run: warm up, put load on, stop at Ctrl-C, hand back the records."""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twostroke.cli.bench.client import BenchClient
from twostroke.cli.bench.load import closed_loop, open_loop
from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.workload import Work

REDRAW_S = 0.25
WARM_UP_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How the load is put on.

    Attributes:
        concurrency: Requests at the same time; None for an open loop.
        requests: How many; None until `works` end or the time is up.
        duration_s: No request starts later; None for no limit.
        warm_up: Requests before, which are not measured.
    """

    concurrency: int | None
    requests: int | None
    duration_s: float | None
    warm_up: int


@dataclass(slots=True)
class RunResult:
    """What came of it.

    Attributes:
        records: All measured requests.
        interrupted: Ctrl-C came first.
    """

    records: list[RequestRecord]
    interrupted: bool = False


async def run_load(client: BenchClient, works: Iterator[Work], warm_up: Iterator[Work], plan: RunPlan) -> RunResult:
    """Run to the end or to Ctrl-C; the requests that then still run stay unfinished."""
    result = RunResult([])
    load = asyncio.create_task(_load(client, works, warm_up, plan, result.records))
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        result.interrupted = True
        load.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    progress = asyncio.create_task(_show(result.records, plan))
    try:
        await load
    except asyncio.CancelledError:
        if not result.interrupted:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        progress.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await progress
        client.close()
    return result


async def _load(
    client: BenchClient, works: Iterator[Work], warm_up: Iterator[Work], plan: RunPlan, records: list[RequestRecord]
) -> None:
    if plan.warm_up:
        concurrency = min(plan.concurrency or WARM_UP_CONCURRENCY, plan.warm_up)
        await closed_loop(itertools.islice(warm_up, plan.warm_up), client.send, concurrency, [])
    if plan.concurrency is None:
        await open_loop(works, client.send, records, plan.duration_s)
    else:
        await closed_loop(works, client.send, plan.concurrency, records, plan.duration_s)


async def _show(records: list[RequestRecord], plan: RunPlan) -> None:
    """Draw a bar on the error stream, where it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        total = plan.requests if plan.duration_s is None else plan.duration_s
        bar = progress.add_task("bench", total=total, state="warming up" if plan.warm_up else "")
        while True:
            ended = sum(record.ended is not None for record in records)
            failed = sum(record.error is not None for record in records)
            state = f"{ended} ended, {len(records) - ended} running, {failed} failed" if records else "warming up"
            done = ended if plan.duration_s is None else progress.tasks[0].elapsed
            progress.update(bar, completed=done, state=state)
            await asyncio.sleep(REDRAW_S)
