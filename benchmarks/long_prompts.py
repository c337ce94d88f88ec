"""A load of two kinds: streams that run all the time, and long prompts that arrive at a steady pace.

    streams start -> all have made some tokens -> window: a long prompt every so often -> the last ones are answered
                                                  |<- gaps between tokens count here ->|

The pace is regular, so that every contender meets the same work at the same times. Whether they keep up with it shows
in the long prompts: where the backlog grows, each waits longer than the one before.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.cli.bench.client import BenchClient, ClientOptions, first_model
from twostroke.cli.bench.connection import Target
from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.statistics import percentile
from twostroke.cli.bench.workload import PromptMaker, Work

VOCABULARY = 1000
STREAM_TOKENS = 7000
"""What a stream asks for: more than it makes in a run; it is given up at the end."""
SETTLED_AT = 16
"""Tokens of each stream before the window opens."""
SETTLE_S = 120.0
ANSWER_S = 120.0
POLL_S = 0.05
KEEPS_UP = 0.1
"""Share of the pace by which one long prompt may wait longer than the one before; a backlog grows by more."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What is sent.

    Attributes:
        streams: How many run all the time.
        stream_prompt: Tokens of a stream's prompt.
        prompt: Tokens of a long prompt.
        output: Tokens of the answer to one.
        every_s: Pace of the long prompts.
        arrivals: How many come.
    """

    streams: int
    stream_prompt: int
    prompt: int
    output: int
    every_s: float
    arrivals: int

    @property
    def window_s(self) -> float:
        """How long the load lasts."""
        return self.every_s * self.arrivals


@dataclass(frozen=True, slots=True)
class Observed:
    """What clients saw.

    Attributes:
        gaps_s: Between the tokens of the streams, ascending.
        ttft_s: Of the long prompts, in order of arrival.
        window_s: How long that was watched.
        every_s: Pace of the long prompts.
    """

    gaps_s: list[float]
    ttft_s: list[float]
    window_s: float
    every_s: float

    def gap_s(self, share: float) -> float:
        """A percentile of the gaps."""
        return percentile(self.gaps_s, share)

    @property
    def mean_ttft_s(self) -> float:
        """Of the long prompts."""
        return sum(self.ttft_s) / len(self.ttft_s)

    @property
    def stream_tokens_per_s(self) -> float:
        """Of all streams together."""
        return len(self.gaps_s) / self.window_s

    @property
    def growth(self) -> float:
        """How much longer each long prompt waits than the one before (least squares), as a share of the pace."""
        count = len(self.ttft_s)
        middle = (count - 1) / 2
        spread = sum((place - middle) ** 2 for place in range(count))
        if not spread:
            return 0.0
        return sum((place - middle) * wait for place, wait in enumerate(self.ttft_s)) / spread / self.every_s

    @property
    def keeps_up(self) -> bool:
        """Whether the backlog stays as it is."""
        return self.growth <= KEEPS_UP


async def lone_ttft_s(url: str, prompt: int, seed: int) -> float:
    """Time to the first token of a prompt of so many tokens that meets no other, after one to warm up.

    Raises:
        RuntimeError: It failed.
    """
    client = await _client(url)
    source = random.Random(seed)
    maker = PromptMaker(VOCABULARY, text=False)
    waits = []
    for length in (min(prompt, 64), prompt):
        record = RequestRecord(time.monotonic())
        await client.send(Work(maker.make(length, source), 2), record)
        if record.error is not None or record.ttft_s is None:
            raise RuntimeError(f"a prompt of {length} tokens failed: {record.error}")
        waits.append(record.ttft_s)
    client.close()
    return waits[-1]


async def observe(urls: Sequence[str], load: OfferedLoad, seed: int) -> Observed:
    """Put the load on servers, each in turn, and watch.

    Args:
        urls: Of the servers; streams and long prompts are dealt out evenly.
        load: What to send.
        seed: Of the prompts.

    Raises:
        RuntimeError: A request failed, or took too long.
    """
    clients = [await _client(url) for url in urls]
    source = random.Random(seed)
    maker = PromptMaker(VOCABULARY, text=False)
    streams = [RequestRecord(time.monotonic()) for _ in range(load.streams)]
    tasks = []
    for index, record in enumerate(streams):
        work = Work(maker.make(load.stream_prompt, source), STREAM_TOKENS)
        tasks.append(asyncio.create_task(clients[index % len(clients)].send(work, record)))
    try:
        await _until_all(streams, [SETTLED_AT] * len(streams))
        begun = time.monotonic()
        longs = [RequestRecord(begun + index * load.every_s) for index in range(load.arrivals)]
        works = [Work(maker.make(load.prompt, source), load.output) for _ in longs]
        await asyncio.gather(
            *(_send_when_due(clients[i % len(clients)], works[i], longs[i]) for i in range(load.arrivals)),
            asyncio.sleep(load.window_s),
        )
        await _until_all(streams, [len(record.chunk_times) + 1 for record in streams])  # the window's last gaps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            client.close()
    return _observed(streams, longs, begun, load)


def _observed(streams: list[RequestRecord], longs: list[RequestRecord], begun: float, load: OfferedLoad) -> Observed:
    """Raises RuntimeError if a long prompt failed."""
    failed = [record.error for record in longs if record.error is not None or not record.chunk_times]
    if failed:
        raise RuntimeError(f"{len(failed)} of {load.arrivals} long prompts failed: {failed[0]}")
    gaps = sorted(gap for record in streams for gap in gaps_within(record.chunk_times, begun, begun + load.window_s))
    ttfts = [record.chunk_times[0] - record.due for record in longs]
    return Observed(gaps, ttfts, load.window_s, load.every_s)


def gaps_within(times: Sequence[float], begun: float, ended: float) -> list[float]:
    """The gaps between `times` that begin in the window."""
    return [later - earlier for earlier, later in itertools.pairwise(times) if begun <= earlier < ended]


async def _client(url: str) -> BenchClient:
    target = Target.parse(url)
    model = await first_model(target, None)
    return BenchClient(target, ClientOptions(model, timeout_s=ANSWER_S + SETTLE_S))


async def _send_when_due(client: BenchClient, work: Work, record: RequestRecord) -> None:
    await asyncio.sleep(max(0.0, record.due - time.monotonic()))
    async with asyncio.timeout(ANSWER_S):
        await client.send(work, record)


async def _until_all(streams: list[RequestRecord], wanted: list[int]) -> None:
    """Wait until every stream has made as many tokens as wanted of it.

    Raises:
        RuntimeError: One failed or ended before, or they took too long.
    """
    deadline = time.monotonic() + SETTLE_S
    while any(len(record.chunk_times) < count for record, count in zip(streams, wanted, strict=True)):
        ended = [record.error or "it ended" for record in streams if record.ended is not None]
        if ended or time.monotonic() > deadline:
            made = [len(record.chunk_times) for record in streams]
            raise RuntimeError(f"a stream broke off ({ended[0] if ended else 'too slow'}): {made} of {wanted} tokens")
        await asyncio.sleep(POLL_S)
