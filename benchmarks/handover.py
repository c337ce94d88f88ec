"""How long is the way from the end of prefill to the first decode step, and what is it made of?

    python -m benchmarks.handover [--rounds 5] [--prompts 256,1024,4096]

One request at a time, on a router, a context and a generation worker of one thread each (`twostroke up`), with a model
that has the demo model's KV cache and computes next to nothing:

    twostroke            the gap between the first token, which the context worker made, and the second
    with a put loop      the same, with the time of the transfer replaced by that of a bare loop of puts of its bytes
    aggregated           the gap between first and second token in one engine, `twostroke serve`: a decode step, no more
    parts                from the servers' `twostroke_handover_seconds`; `docs/operations.md` says what each is

And the time to the first token, which must not contain any of it: against a request that ends with its first token, and
with the generation worker stopped (SIGSTOP), when no transfer can begin.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import running_cluster, running_server
from benchmarks.copy_lists import Pattern
from benchmarks.demo_kv_model import BLOCK_BYTES, BLOCK_TOKENS, MAX_MODEL_LEN, save_demo_kv_model
from benchmarks.handover_times import await_next, scrape
from benchmarks.kv_transfer import Pair, Spent, running_pair
from benchmarks.processes import free_port
from benchmarks.report import Better, Report, interleave, output_options, publish
from kvtransfer.options import SharedMemory
from tests.support.processes import command_line, descendants
from tests.support.tiny_models import VOCAB_SIZE
from twostroke.cli.bench.client import BenchClient, ClientOptions, first_model
from twostroke.cli.bench.connection import Target
from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.workload import FIRST_TOKEN_ID, Work
from twostroke.protocol.durations import HandoverPart

OURS, LOOP, AGGREGATED = "twostroke", "with a put loop", "aggregated"
CONTEXT_ONLY, STOPPED = "ends with its first token", "generation worker stopped"
OUTPUT_TOKENS = 4
MS = 1e3
_LOOK_S = 0.001
NOISE = 1.1
"""What the time to first token may differ by."""
STOPPED_TOKENS = 512
"""Longer prompts take longer than the router waits for a silent worker."""
CACHE = {"kv_cache": {"block_size": BLOCK_TOKENS, "num_blocks": 1024, "max_leased_share": 1, "max_reserved_share": 1}}
WRITER = (HandoverPart.FIRST_PUT, HandoverPart.WRITE, HandoverPart.FLUSH)


@dataclass(slots=True)
class TwoRoles:
    """The cluster under test, and the parts of its hand-overs so far.

    Attributes:
        url: Of the router.
        context: URL of the context server.
        generation: Of the generation server.
        generation_pid: The generation worker's process.
        parts: Milliseconds of each part, each hand-over.
    """

    url: str
    context: str
    generation: str
    generation_pid: int
    parts: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@contextlib.contextmanager
def running_two_roles(model: Path, folder: Path) -> Iterator[TwoRoles]:
    """Start the cluster."""
    ports = {role: free_port() for role in ("context", "generation")}
    roles = {role: {"threads": 1, "port": port, **CACHE} for role, port in ports.items()}
    with running_cluster(model, folder, roles) as cluster:
        (pid,) = (one for one in descendants(cluster.pid) if "generation_server.worker" in command_line(one))
        context, generation = (f"http://127.0.0.1:{port}" for port in ports.values())
        yield TwoRoles(cluster.url, context, generation, pid)


class Asker:
    """Sends requests with prompts that nobody has seen, one at a time.

    Args:
        tokens: Length of the prompts.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._draw = random.Random(tokens)

    def ask(self, url: str, output_tokens: int, on_first: Callable[[], None] | None = None) -> RequestRecord:
        """Send one and read its whole answer.

        Args:
            url: Where.
            output_tokens: How many to ask for.
            on_first: Called soon after the first token.

        Raises:
            RuntimeError: It failed, or its tokens came all at once.
        """
        prompt = [self._draw.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(self._tokens)]
        record = asyncio.run(_ask(url, Work(prompt, output_tokens), on_first))
        if record.error is not None or len(record.chunk_times) < min(2, output_tokens):
            raise RuntimeError(f"{url}: {record.error or f'{len(record.chunk_times)} chunks'}")
        return record


async def _ask(url: str, work: Work, on_first: Callable[[], None] | None) -> RequestRecord:
    target = Target.parse(url)
    client = BenchClient(target, ClientOptions(await first_model(target, None)))
    record = RequestRecord(time.monotonic())
    sending = asyncio.create_task(client.send(work, record))
    while on_first is not None and not record.chunk_times and not sending.done():  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(_LOOK_S)
    if on_first is not None:
        on_first()
    await sending
    client.close()
    return record


def gap_ms(record: RequestRecord) -> float:
    """Between first and second token."""
    return (record.chunk_times[1] - record.chunk_times[0]) * MS


def ttft_ms(record: RequestRecord) -> float:
    """To the first token."""
    return (record.chunk_times[0] - record.due) * MS


def hand_over(roles: TwoRoles, asker: Asker, ttft: list[float]) -> float:
    """One request through both roles: its gap; its parts and its time to first token are noted."""
    context, generation = scrape(roles.context), scrape(roles.generation)
    record = asker.ask(roles.url, OUTPUT_TOKENS)
    seconds = {
        **await_next(roles.context, context, HandoverPart.FLUSH),
        **await_next(roles.generation, generation, HandoverPart.FIRST_STEP),
    }
    for part, value in seconds.items():
        roles.parts[part].append(value * MS)
    written = sum(seconds[part] for part in WRITER)
    roles.parts["control messages (of transfer)"].append((seconds[HandoverPart.TRANSFER] - written) * MS)
    ttft.append(ttft_ms(record))
    return gap_ms(record)


def ttft_while_stopped(roles: TwoRoles, asker: Asker) -> float:
    """Time to first token while nobody can ask for the KV cache; the worker goes on before the router misses it.

    The hand-over that follows is waited for, so that its parts are not taken for the next one's.
    """
    before = scrape(roles.context), scrape(roles.generation)
    os.kill(roles.generation_pid, signal.SIGSTOP)
    goes_on = functools.partial(os.kill, roles.generation_pid, signal.SIGCONT)
    try:
        record = asker.ask(roles.url, OUTPUT_TOKENS, goes_on)
    finally:
        goes_on()
    await_next(roles.context, before[0], HandoverPart.FLUSH)
    await_next(roles.generation, before[1], HandoverPart.FIRST_STEP)
    return ttft_ms(record)


@dataclass(slots=True)
class Bench:
    """What is measured.

    Attributes:
        roles: The cluster.
        aggregated: URL of the one engine.
        rounds: Requests of each contender and length.
        report: Takes the samples.
    """

    roles: TwoRoles
    aggregated: str
    rounds: int
    report: Report

    def measure(self, tokens: int) -> None:
        """All contenders for one length of prompts."""
        blocks = tokens // BLOCK_TOKENS
        with running_pair(blocks * BLOCK_BYTES, BLOCK_BYTES, SharedMemory.OFF) as pair:
            loop_ms: list[float] = []
            ttft: list[float] = []
            contenders = self._contenders(Asker(tokens), pair, loop_ms, ttft)
            for warm_up in contenders.values():
                warm_up()
            loop_ms.clear()
            ttft.clear()
            self.roles.parts.clear()
            if tokens <= STOPPED_TOKENS:
                contenders[STOPPED] = functools.partial(ttft_while_stopped, self.roles, Asker(tokens + 1))
            samples = interleave(self.rounds, contenders, f"{tokens} tokens")
        self._report(tokens, samples, loop_ms, ttft)

    def _contenders(
        self, asker: Asker, pair: Pair, loop_ms: list[float], ttft: list[float]
    ) -> dict[str, Callable[[], float]]:
        """Each measures once; what is noted beside goes to the lists."""

        def put_loop() -> float:
            loop_ms.append(pair.nbytes / pair.put(Pattern.CONTIGUOUS, Spent([], [])) / 1e9 * MS)
            return loop_ms[-1]

        return {
            OURS: functools.partial(hand_over, self.roles, asker, ttft),
            LOOP: put_loop,
            AGGREGATED: lambda: gap_ms(asker.ask(self.aggregated, OUTPUT_TOKENS)),
            CONTEXT_ONLY: lambda: ttft_ms(asker.ask(self.roles.url, 1)),
        }

    def _report(self, tokens: int, samples: dict[str, list[float]], loop_ms: list[float], ttft: list[float]) -> None:
        report, parts = self.report, self.roles.parts
        replaced = [a - b + c for a, b, c in zip(samples[OURS], parts[HandoverPart.TRANSFER], loop_ms, strict=True)]
        gaps = {OURS: samples[OURS], LOOP: replaced, AGGREGATED: samples[AGGREGATED]}
        report.add(f"{tokens} tokens, gap", "ms", gaps)
        report.add(f"{tokens} tokens, part", "ms", {**parts, "the put loop alone": loop_ms})
        first = f"{tokens} tokens, TTFT"
        others = {name: samples[name] for name in (CONTEXT_ONLY, STOPPED) if name in samples}
        report.add(first, "ms", {OURS: ttft, **others})
        for other in others:
            report.compare(first, OURS, other, better=Better.LOWER, limit=NOISE, aim=1.0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="requests of each contender and length (%(default)s)")
    parser.add_argument("--prompts", default="256,1024,4096", help="lengths in tokens, full blocks (%(default)s)")
    output_options(parser)
    options = parser.parse_args()
    lengths = [int(length) for length in options.prompts.split(",")]
    if any(length % BLOCK_TOKENS or not length < MAX_MODEL_LEN - OUTPUT_TOKENS for length in lengths):
        parser.error(f"--prompts: multiples of {BLOCK_TOKENS} below {MAX_MODEL_LEN}, not {options.prompts}")

    report = Report(
        "handover",
        "How long is the way from the end of prefill to the first decode step?",
        {"rounds": options.rounds, "prompts": options.prompts, "block_bytes": BLOCK_BYTES},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_demo_kv_model(folder / "model")
        one_engine = {"aggregated": {"threads": 1, "port": 0, **CACHE}}
        with (
            running_two_roles(model, folder / "two") as roles,
            running_server(model, folder / "one", one_engine) as aggregated,
        ):
            bench = Bench(roles, aggregated.url, options.rounds, report)
            for tokens in lengths:
                bench.measure(tokens)
    publish(report, options.out)


if __name__ == "__main__":
    main()
