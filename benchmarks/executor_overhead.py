"""What does a token cost between a frontend and its engine, in each form of the executor?

Puts closed loads on the in-process, ipc and remote forms around the same instant engine (`instant_engine`), and reads
the CPU time of the frontend's process and of the worker's apart:

    python -m benchmarks.executor_overhead [--rounds 5] [--streams 1 64 512]

    paced tokens    an engine step every 20 ms, as beside a model: every token wakes its reader
    tokens          as fast as it goes: tokens/s; readers that lag behind take several tokens at once
    requests        one token each, as fast as they go: requests/s
    lone request    one token, on a machine that idles: the latency that a form adds

Beside the last three stand engines alone and a bare queue (`executor_floors`): what a form cannot be cheaper than, and
what the real engine's bookkeeping adds to any. "frontend" is the CPU of the process that submits and reads, by a task
a stream on one event loop; in the in-process form it holds the engine too.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager

import uvloop

from benchmarks.executor_floors import alone, bare_queue, engine_alone
from benchmarks.executor_forms import Form, Load, Spent, lone_request_s, measure, open_forms
from benchmarks.instant_engine import InstantEngine
from benchmarks.report import Better, Report, interleave, output_options, publish
from benchmarks.zmq_echo import echo
from twostroke.engine.engine import Engine

IN_PROCESS, IPC, REMOTE = "in-process", "ipc", "remote"
INSTANT_ENGINE, REAL_ENGINE, BARE_QUEUE = "instant engine alone", "real engine alone", "bare pyzmq"
SHARE_AT_MOST = 1 / 3
"""What a token may cost at the most streams, of its cost at one stream."""
ADDED_AT_MOST_US = 300.0
"""What the ipc form may add to a lone request."""
STEP_MS = 20
PACED_TOKENS = 64
LONE_REQUESTS = 100
PAUSE_S = 0.002
US = 1e6

Measure = Callable[[Load], Spent]
Samples = dict[int, dict[str, list[Spent]]]
"""By number of streams and by contender, one a round."""


class Bench:
    """All contenders, open, on one event loop."""

    def __init__(self, runner: asyncio.Runner, forms: Mapping[str, Form], floors: Mapping[str, Measure]) -> None:
        self._runner = runner
        self.forms = forms
        self._floors = floors

    def samples(self, loads: Sequence[Load], rounds: int, what: str) -> Samples:
        """Every contender under every load; paced loads are for the forms alone."""
        return {load.streams: interleave(rounds, self._contenders(load), f"{what}, {load.streams}") for load in loads}

    def lone_us(self, rounds: int) -> dict[str, list[list[float]]]:
        """Microseconds of each lone request, by contender and round."""
        contenders = {name: self._lone(form) for name, form in self.forms.items()}
        queue = self._below(self._floors[BARE_QUEUE], Load(1, 1, 1))
        lone = {**contenders, BARE_QUEUE: lambda: [queue().wall_s * US for _ in range(LONE_REQUESTS)]}
        return interleave(rounds, lone, "lone requests")

    def _contenders(self, load: Load) -> dict[str, Callable[[], Spent]]:
        forms = {name: self._on(form, load) for name, form in self.forms.items()}
        floors = {} if load.step_ms else {name: self._below(floor, load) for name, floor in self._floors.items()}
        return forms | floors

    def _on(self, form: Form, load: Load) -> Callable[[], Spent]:
        return lambda: self._runner.run(measure(form, load))

    def _below(self, floor: Measure, load: Load) -> Callable[[], Spent]:
        # On another thread, since a frontend whose loop stands still falls silent.
        return lambda: self._runner.run(asyncio.to_thread(floor, load))

    def _lone(self, form: Form) -> Callable[[], list[float]]:
        return lambda: [spent * US for spent in self._runner.run(lone_request_s(form, LONE_REQUESTS, PAUSE_S))]


@contextmanager
def open_bench(streams: int) -> Iterator[Bench]:
    """Start everything that is measured, for up to `streams` requests at the same time."""
    instant, real = alone(InstantEngine, streams), alone(Engine, streams)
    with ExitStack() as stack:
        queue = stack.enter_context(echo())
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        opened = AsyncExitStack()
        try:
            forms = runner.run(opened.enter_async_context(open_forms(streams)))
            floors: dict[str, Measure] = {
                INSTANT_ENGINE: lambda load: engine_alone(instant, load),
                REAL_ENGINE: lambda load: engine_alone(real, load),
                BARE_QUEUE: lambda load: bare_queue(queue, load),
            }
            yield Bench(runner, forms, floors)
        finally:
            runner.run(opened.aclose())


def add_rates(report: Report, samples: Samples, loads: Sequence[Load], what: str) -> None:
    """Tokens or requests a second, all contenders side by side."""
    for load in loads:
        count = load.all_tokens if what == "tokens" else load.all_requests
        rates = {name: [count / one.wall_s for one in many] for name, many in samples[load.streams].items()}
        report.add(f"{what}, {_streams(load)}", f"{what}/s", rates)


def add_costs(report: Report, samples: Samples, loads: Sequence[Load], what: str) -> None:
    """CPU time per token or request of each contender, its numbers of streams side by side."""

    def add(case: str, name: str, spent_us: Callable[[Spent], float]) -> None:
        costs = {
            _streams(load): [spent_us(one) / load.all_tokens for one in samples[load.streams][name]] for load in loads
        }
        report.add(f"{what}, {case}", "us of CPU each", costs)

    for name in next(iter(samples.values())):
        add(name, name, lambda spent: spent.frontend_us + spent.worker_us)
        if name in {IPC, REMOTE}:
            add(f"{name} frontend", name, lambda spent: spent.frontend_us)
            add(f"{name} worker", name, lambda spent: spent.worker_us)


def add_lone(report: Report, lone: Mapping[str, list[list[float]]]) -> None:
    """Latency of a lone request, and what a form adds to the in-process one.

    Other work on the machine delays wake-ups: the least tenth of a round's requests met an idle one.
    """
    least = {name: [statistics.quantiles(one, n=10)[0] for one in rounds] for name, rounds in lone.items()}
    report.add("lone request, median", "us", {name: [statistics.median(one) for one in lone[name]] for name in lone})
    report.add("lone request, least tenth", "us", least)
    added = {
        name: [mine - base for mine, base in zip(least[name], least[IN_PROCESS], strict=True)] for name in (IPC, REMOTE)
    }
    bound = [ADDED_AT_MOST_US] * len(least[IN_PROCESS])
    report.add("added to a lone request", "us", {**added, "bound": bound})
    report.compare("added to a lone request", IPC, "bound", better=Better.LOWER, limit=1, aim=1)


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything."""
    streams, rounds = sorted(arguments.streams), arguments.rounds
    paced = [Load(count, 1, PACED_TOKENS, STEP_MS) for count in streams]
    long = [Load(count, 1, max(64, arguments.tokens // count)) for count in streams]
    short = [Load(count, max(5, arguments.requests // count), 1) for count in streams]
    report = Report(
        "executor_overhead",
        "What does a token cost between a frontend and its engine, in each form of the executor?",
        {
            "rounds": rounds,
            "paced tokens": [f"{load.streams} streams x {load.tokens}, every {load.step_ms} ms" for load in paced],
            "tokens": [f"{load.streams} streams x {load.tokens}" for load in long],
            "requests": [f"{load.streams} streams x {load.requests}" for load in short],
        },
    )
    with open_bench(streams[-1]) as bench:
        bench.samples(long, 1, "warm-up")
        for what, loads in (("paced tokens", paced), ("tokens", long), ("requests", short)):
            samples = bench.samples(loads, rounds, what)
            add_costs(report, samples, loads, what)
            if loads is not paced:
                add_rates(report, samples, loads, what)
        add_lone(report, bench.lone_us(rounds))
    _judge(report, most=_streams(long[-1]), least=_streams(long[0]))
    return report


def _judge(report: Report, most: str, least: str) -> None:
    for what in ("paced tokens", "tokens"):
        for name in (IN_PROCESS, IPC, REMOTE):
            report.compare(f"{what}, {name}", most, least, better=Better.LOWER, limit=SHARE_AT_MOST, aim=SHARE_AT_MOST)


def _streams(load: Load) -> str:
    return "1 stream" if load.streams == 1 else f"{load.streams} streams"


def main() -> None:
    """Read the command line, measure, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="samples of each figure (%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512], help="requests at a time (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of one sample, at least (%(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="requests of one sample, at least (%(default)s)")
    output_options(parser)
    arguments = parser.parse_args()
    publish(run(arguments), arguments.out)


if __name__ == "__main__":
    main()
