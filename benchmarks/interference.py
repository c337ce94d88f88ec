"""How much do long prompts disturb the streams that run, with prefill and decode apart and in one engine?

    python -m benchmarks.interference [--rounds 2] [--streams 6] [--prompt 768] [--no-sweep]

Two engine threads for everyone, on the demo model:

    disaggregated           `twostroke up`: a context and a generation worker of one thread each, and the router
    aggregated, chunk N     `twostroke serve` with two threads and a budget of N tokens a step
    two aggregated, chunk N two `twostroke serve` of one thread each, the load dealt out evenly at no cost

Streams run all the time, and long prompts arrive at a steady pace: so many that they keep the context worker busy for
`--busy` of the time, which is measured first. Whether everyone sustains that is seen in the run: the long prompts must
not wait longer and longer. A small chunk disturbs streams less and lets long prompts wait longer: the sweep over chunk
sizes shows that trade, beside what disaggregation makes of it.
"""

import argparse
import asyncio
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import demo_model, running_cluster, running_server
from benchmarks.long_prompts import Observed, OfferedLoad, lone_ttft_s, observe
from benchmarks.report import Better, Report, interleave, output_options, publish

DISAGGREGATED = "disaggregated"
USUAL_CHUNKS = (512, 2048)
OTHER_CHUNKS = (64, 128, 256, 1024)
P99 = "gap between tokens, p99"
STREAM_PROMPT = 64
THREADS = 2
LIMIT = 0.35
AIM = 0.2
MS = 1e3


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to spend two threads.

    Attributes:
        chunk: Tokens of one engine step at most; None for the two roles, which keep their defaults.
        servers: How many aggregated engines share the threads.
    """

    name: str
    chunk: int | None = None
    servers: int = 1

    @property
    def threads(self) -> int:
        """Of each of its engines."""
        return 1 if self.chunk is None else THREADS // self.servers

    @contextmanager
    def running(self, model: Path, dtype: str, folder: Path) -> Iterator[list[str]]:
        """Start it; the URLs that it serves at."""
        common = {"model": {"dtype": dtype}}
        with ExitStack() as stack:
            if self.chunk is None:
                roles = {role: {"threads": self.threads} for role in ("context", "generation")}
                yield [stack.enter_context(running_cluster(model, folder, {**common, **roles})).url]
                return
            engine = {"port": 0, "threads": self.threads, "max_batched_tokens": self.chunk}
            document = {**common, "aggregated": engine}
            folders = [folder / f"server-{number}" for number in range(self.servers)]
            yield [stack.enter_context(running_server(model, one, document)).url for one in folders]


def aggregated(chunk: int) -> Contender:
    """One engine with both threads."""
    return Contender(f"aggregated, chunk {chunk}", chunk)


def two_aggregated(chunk: int) -> Contender:
    """Two engines with a thread each."""
    return Contender(f"two aggregated, chunk {chunk}", chunk, servers=2)


COMPARED = (Contender(DISAGGREGATED), *map(aggregated, USUAL_CHUNKS))
SWEPT = (*map(aggregated, OTHER_CHUNKS), *map(two_aggregated, USUAL_CHUNKS))


def pace_s(model: Path, dtype: str, folder: Path, prompt: int, busy: float) -> float:
    """How often a long prompt may come for the context worker to compute for `busy` of the time."""
    with COMPARED[0].running(model, dtype, folder) as urls:
        return round(asyncio.run(lone_ttft_s(urls[0], prompt, seed=0)) / busy, 1)


@dataclass(slots=True)
class Bench:
    """The runs so far.

    Attributes:
        load: What each contender is asked.
        observed: By contender, one a round.
    """

    model: Path
    dtype: str
    load: OfferedLoad
    folder: Path
    observed: dict[str, list[Observed]] = field(default_factory=dict)

    def run(self, rounds: int, contenders: tuple[Contender, ...], what: str) -> None:
        """Measure all in turn, round by round."""
        turns = {one.name: functools.partial(self._measure, one) for one in contenders}
        interleave(rounds, turns, what)

    def _measure(self, contender: Contender) -> float:
        """One round of one contender; its 99th percentile in seconds."""
        seen = self.observed.setdefault(contender.name, [])
        folder = self.folder / f"{contender.name.replace(', ', '-').replace(' ', '-')}-{len(seen)}"
        with contender.running(self.model, self.dtype, folder) as urls:
            seen.append(asyncio.run(observe(urls, self.load, seed=len(seen))))
        return seen[-1].gap_s(0.99)


FIGURES: tuple[tuple[str, str, Callable[[Observed], float]], ...] = (
    (P99, "ms", lambda seen: seen.gap_s(0.99) * MS),
    ("gap between tokens, p50", "ms", lambda seen: seen.gap_s(0.5) * MS),
    ("longest gap", "ms", lambda seen: seen.gap_s(1.0) * MS),
    ("time to first token of a long prompt, mean", "s", lambda seen: seen.mean_ttft_s),
    ("tokens of all streams", "tokens/s", lambda seen: seen.stream_tokens_per_s),
    ("growth of a long prompt's wait", "share of the pace", lambda seen: seen.growth),
)


def make_report(bench: Bench, settings: dict[str, object]) -> Report:
    """All figures, and the ratios that were promised."""
    load = bench.load
    report = Report("interference", "How long do running streams wait for a token while long prompts arrive?", settings)
    for case, unit, figure in FIGURES:
        report.add(case, unit, {name: [figure(seen) for seen in runs] for name, runs in bench.observed.items()})
    for chunk in USUAL_CHUNKS:
        report.compare(P99, DISAGGREGATED, aggregated(chunk).name, better=Better.LOWER, limit=LIMIT, aim=AIM)
    report.notes.append(
        f"load: {load.streams} streams, and a prompt of {load.prompt} tokens every {load.every_s:g} s "
        f"({load.arrivals} in {load.window_s:g} s), each answered with {load.output} tokens"
    )
    behind = [name for name, runs in bench.observed.items() if not all(seen.keeps_up for seen in runs)]
    report.notes.append(f"did not keep up with that: {', '.join(behind)}" if behind else "all kept up with that")
    return report


def main() -> None:
    """Read the command line, measure, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of the three that are compared (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (%(default)s)")
    parser.add_argument("--streams", type=int, default=6, help="streams that run all the time (%(default)s)")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a long prompt (%(default)s)")
    parser.add_argument("--output", type=int, default=8, help="tokens of the answer to one (%(default)s)")
    parser.add_argument("--arrivals", type=int, default=5, help="long prompts in a round (%(default)s)")
    parser.add_argument("--busy", type=float, default=0.7, help="share of its time that prefill takes (%(default)s)")
    parser.add_argument("--no-sweep", action="store_true", help="leave out the contenders that are only reported")
    output_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, folder = demo_model(), Path(name)
        every_s = pace_s(model, arguments.dtype, folder / "pace", arguments.prompt, arguments.busy)
        load = OfferedLoad(
            arguments.streams, STREAM_PROMPT, arguments.prompt, arguments.output, every_s, arguments.arrivals
        )
        bench = Bench(model, arguments.dtype, load, folder)
        bench.run(arguments.rounds, COMPARED, "compared")
        if not arguments.no_sweep:
            bench.run(1, SWEPT, "swept")
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    publish(make_report(bench, settings), arguments.out)


if __name__ == "__main__":
    main()
