"""How much processor time does a router spend on a request, on a stream, and on a token of a stream?

    per request       a completion of 16 tokens, answered whole; 32 clients, each asks again when it has its answer
    per stream        the same, streamed
    per chunk         64 and 256 streams that get a token every 20 ms each, all of them in the same step

All of the router's process counts, its idle work too; nothing is subtracted. twostroke's router does all that it does
in service: it checks an API key, keeps its ledger, runs the context and the generation leg with the hand-over between
them, and makes text of the tokens. Behind it are instant workers that speak the real protocol.
"""

import argparse
import asyncio
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.http_load import Connection, ask_in_turn, connect
from benchmarks.processes import cpu_us
from benchmarks.report import Absence, Better, Report, interleave, output_options, publish
from benchmarks.router_contenders import STEP_MS, TEXT, TWOSTROKE, Contender, twostroke
from benchmarks.router_peers import (
    DYNAMO,
    SGLANG_ROUTER,
    VLLM_ROUTER,
    dynamo,
    missing,
    sglang_router,
    until_served,
    vllm_router,
)
from twostroke.cli.model.commands import fetch_with_progress
from twostroke.frontend.tokenizer import TextModel

CLIENTS = 32
PEERS = Path(os.environ.get("TWOSTROKE_PEERS", "peers"))
PACED_STREAMS = (64, 256)
NOTES = (
    "CPU time of all threads of the router's process, from schedstat; nothing is subtracted.",
    "The Rust routers neither tokenize nor detokenize, and count no tokens. sglang-router takes text prompts only.",
    "Dynamo's mocker keeps a pace of its own, about 20 ms a token where the processor allows it.",
)
RUST = (VLLM_ROUTER, SGLANG_ROUTER)
_BEGIN_S = 10.0
"""Paced streams have all begun, and settled, within this."""
_SETTLE_S = 0.5
_OWN_CHUNK = 0.98
"""Each token has a chunk of its own, but for the steps at the edges of what is looked at, and for those that come while
the router does not get the processor: a figure with many of those is none."""
_TRIES = 3
_TOKENIZED = 200


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        prompt_tokens: Length of each prompt.
        tokens: Length of each answer that is not paced.
        requests: How many of them a round.
        paced_s: How long paced streams are looked at in a round.
    """

    prompt_tokens: int
    tokens: int
    requests: int
    paced_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """A part of some paced streams that was looked at.

    Attributes:
        spent_us: The router's processor time in it.
        chunks: That arrived in it.
        tokens: That workers made in it, as far as their pace tells.
    """

    spent_us: float
    chunks: int
    tokens: float

    @property
    def share(self) -> float:
        """Of tokens that had a chunk of their own."""
        return self.chunks / self.tokens


async def per_request(contender: Contender, sizes: Sizes, *, stream: bool) -> float:
    """CPU microseconds for one request at full load."""
    request = contender.request(sizes.prompt_tokens, sizes.tokens, stream=stream)
    connections = await connect(contender.port, CLIENTS)
    await ask_in_turn(connections, request, 2)
    each = max(sizes.requests // CLIENTS, 1)
    before = cpu_us(contender.pid)
    await ask_in_turn(connections, request, each)
    spent = cpu_us(contender.pid) - before
    for connection in connections:
        connection.close()
    return spent / (each * CLIENTS)


async def per_chunk(contender: Contender, sizes: Sizes, streams: int) -> float:
    """CPU microseconds for one chunk of paced streams, each token in a chunk of its own.

    Raises:
        RuntimeError: Tokens shared chunks, time and again.
    """
    for _ in range(_TRIES):
        window = await paced(contender, sizes, streams)
        if window.share >= _OWN_CHUNK or not contender.keeps_pace:
            return window.spent_us / window.chunks
    raise RuntimeError(
        f"{contender.name}: {window.chunks} chunks for {window.tokens:.0f} tokens of {streams} paced streams, "
        f"{_TRIES} times in a row fewer than {_OWN_CHUNK:.0%}: is the machine busy?"
    )


async def paced(contender: Contender, sizes: Sizes, streams: int) -> Window:
    """Look at paced streams once all of them run; then leave them.

    Raises:
        RuntimeError: Some did not begin in time, or ended before they should.
    """
    tokens = int((_BEGIN_S + sizes.paced_s) * 1000 / STEP_MS)
    request = contender.request(sizes.prompt_tokens, tokens, stream=True, step_ms=STEP_MS)
    connections = await connect(contender.port, streams)
    asking = [asyncio.ensure_future(connection.ask(request)) for connection in connections]
    await _begun(contender, connections)
    before, chunks_before, began = cpu_us(contender.pid), _events(connections), time.monotonic()
    await asyncio.sleep(sizes.paced_s)
    spent, chunks = cpu_us(contender.pid) - before, _events(connections) - chunks_before
    took_s = time.monotonic() - began
    ended = sum(one.done() for one in asking)
    for connection in connections:
        connection.close()
    await asyncio.gather(*asking, return_exceptions=True)
    if ended or not chunks:
        seen = f"{chunks} chunks in {took_s:.1f} s, and {ended} of {streams} streams ended"
        raise RuntimeError(f"{contender.name}: {seen}")
    return Window(spent, chunks, streams * took_s * 1000 / STEP_MS)


async def _begun(contender: Contender, connections: list[Connection]) -> None:
    """Wait until all streams have begun, and settled after that."""
    deadline = time.monotonic() + _BEGIN_S - _SETTLE_S
    while silent := sum(not connection.events for connection in connections):
        if time.monotonic() > deadline:
            problem = f"{silent} of {len(connections)} streams did not begin within {_BEGIN_S} s"
            raise RuntimeError(f"{contender.name}: {problem}")
        await asyncio.sleep(STEP_MS / 1000)
    await asyncio.sleep(_SETTLE_S)


def _events(connections: list[Connection]) -> int:
    return sum(connection.events for connection in connections)


def tokenizing(model: Path, tokens: int) -> float:
    """CPU microseconds for a prompt of `tokens` tokens given as text, which is no part of the other figures."""
    text = TextModel.load(model)
    prompt = text.decode(text.encode(TEXT * tokens, add_special_tokens=False)[:tokens])
    text.encode(prompt, add_special_tokens=True)
    before = time.process_time()
    for _ in range(_TOKENIZED):
        text.encode(prompt, add_special_tokens=True)
    return (time.process_time() - before) / _TOKENIZED * 1e6


Measure = Callable[[Contender], float]


def cases(runner: asyncio.Runner, sizes: Sizes) -> dict[str, Measure]:
    """What is measured of each contender, by name."""

    def chunks(streams: int) -> Measure:
        return lambda contender: runner.run(per_chunk(contender, sizes, streams))

    measures: dict[str, Measure] = {
        "per request": lambda contender: runner.run(per_request(contender, sizes, stream=False)),
        f"per {sizes.tokens}-token stream": lambda contender: runner.run(per_request(contender, sizes, stream=True)),
    }
    return measures | {f"per chunk, {streams} paced streams": chunks(streams) for streams in PACED_STREAMS}


def start(peers: Path, model: Path, stack: ExitStack, report: Report) -> list[Contender]:
    """Start all contenders whose environments are there; the others are noted in the report."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    contenders = [stack.enter_context(twostroke(model, folder))]
    starts: dict[str, Callable[[], AbstractContextManager[Contender]]] = {
        VLLM_ROUTER: lambda: vllm_router(peers, folder),
        SGLANG_ROUTER: lambda: sglang_router(peers, folder),
        DYNAMO: lambda: dynamo(peers, model, folder),
    }
    for name, begin in starts.items():
        reason = missing(name, peers)
        if reason is None:
            contenders.append(stack.enter_context(begin()))
        else:
            report.absent.append(Absence(name, reason))
    return contenders


def compare(report: Report, case: str, measured: Sequence[str]) -> None:
    """Set twostroke against the best Rust router of the case, and against Dynamo's frontend."""
    rust = [name for name in RUST if name in measured]
    if rust:
        best = min(rust, key=lambda name: report.of(case, name).median)
        report.compare(case, TWOSTROKE, best, better=Better.LOWER, limit=1.3, aim=1.0)
    if DYNAMO in measured:
        report.compare(case, TWOSTROKE, DYNAMO, better=Better.LOWER, limit=0.4, aim=0.3)


def main() -> None:
    """Start the contenders, measure them in turn, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each figure (%(default)s)")
    parser.add_argument("--requests", type=int, default=1600, help="requests or streams a sample (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="length of their answers (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of prompts (%(default)s)")
    parser.add_argument("--paced-s", type=float, default=2.0, help="seconds of paced streams a sample (%(default)s)")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer to use (default: the demo model)")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments (%(default)s)")
    output_options(parser)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.prompt_tokens, arguments.tokens, arguments.requests, arguments.paced_s)
    settings = {"rounds": arguments.rounds, "clients": CLIENTS, "step_ms": STEP_MS, "tokens": sizes.tokens}
    settings |= {"prompt_tokens": sizes.prompt_tokens, "requests": sizes.requests, "paced_s": sizes.paced_s}
    report = Report("router_overhead", "How much processor time does a router spend on what it passes on?", settings)
    model = arguments.model or fetch_with_progress()
    report.notes += NOTES
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        contenders = start(arguments.peers, model, stack, report)
        for contender in contenders:
            runner.run(until_served(contender))
        for case, measure in cases(runner, sizes).items():
            bound = {one.name: functools.partial(measure, one) for one in contenders}
            report.add(case, "us", interleave(arguments.rounds, bound, case))
            compare(report, case, [one.name for one in contenders])
    case = f"tokenizing a prompt of {sizes.prompt_tokens} tokens"
    report.add(
        case, "us", interleave(arguments.rounds, {TWOSTROKE: lambda: tokenizing(model, sizes.prompt_tokens)}, case)
    )
    publish(report, arguments.out)


if __name__ == "__main__":
    main()
