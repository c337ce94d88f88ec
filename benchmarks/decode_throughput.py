"""How fast does the engine decode and prefill, beside the model library that its models come from?

    python -m benchmarks.decode_throughput [--rounds 3] [--batches 1 8 32] [--lengths 512 1024] [--dtype bfloat16]

Decode: tokens/s at each batch size, against `transformers.generate` (greedy, its default cache) and against the model's
matrix products alone. Prefill: tokens/s of a prompt, against a plain forward pass. Prefix cache: TTFT of a prompt of
which 90% is cached, against one of which nothing is. Parts: where the time of a decode step goes, under Python's
profiler. All on one thread, with the demo model unless told otherwise.
"""

import argparse
import os
from pathlib import Path

import torch

from benchmarks.decode_contenders import MAX_SEQUENCES, EngineContender, LibraryContender, Prompts
from benchmarks.report import Better, Report, interleave, output_options, publish
from twostroke.cli.model import demo
from twostroke.protocol.config import Dtype

ENGINE, LIBRARY, PRODUCTS = "twostroke", "transformers", "matrix products alone"
UNCACHED, CACHED = "nothing cached", "90% cached"
PROMPT_TOKENS = 128
CACHED_SHARE = 0.9
BOUNDS = {1: (1.2, 1.4), 8: (1.5, 2.0), 32: (1.7, 2.4)}
"""By batch size: how many times the library's tokens/s the engine must give, and should."""
PREFILL_BOUNDS = (0.9, 1.0)
PREFIX_BOUNDS = (0.2, 0.15)


def add_decodes(report: Report, engine: EngineContender, library: LibraryContender, args: argparse.Namespace) -> None:
    """Tokens/s at each batch size."""
    for batch in args.batches:
        case = f"decode, batch {batch}"
        contenders = {
            ENGINE: lambda batch=batch: engine.decode_rate(batch, PROMPT_TOKENS, args.tokens),
            LIBRARY: lambda batch=batch: library.decode_rate(batch, PROMPT_TOKENS, args.tokens, args.seconds),
            PRODUCTS: lambda batch=batch: library.matrix_products_rate(batch, args.seconds / 2),
        }
        report.add(case, "tokens/s", interleave(args.rounds, contenders, case))
        if batch in BOUNDS:
            limit, aim = BOUNDS[batch]
            report.compare(case, ENGINE, LIBRARY, better=Better.HIGHER, limit=limit, aim=aim)


def add_prefills(report: Report, engine: EngineContender, library: LibraryContender, args: argparse.Namespace) -> None:
    """Prompt tokens/s at each length."""
    limit, aim = PREFILL_BOUNDS
    for length in args.lengths:
        case = f"prefill, {length} tokens"
        contenders = {
            ENGINE: lambda length=length: engine.prefill_rate(length),
            LIBRARY: lambda length=length: library.prefill_rate(length),
        }
        report.add(case, "tokens/s", interleave(args.prefill_rounds, contenders, case))
        report.compare(case, ENGINE, LIBRARY, better=Better.HIGHER, limit=limit, aim=aim)


def add_prefix(report: Report, engine: EngineContender, prompts: Prompts, args: argparse.Namespace) -> None:
    """TTFT with and without a cached prefix; the prompt of each round's first turn is the second one's prefix."""
    length = max(args.lengths)
    shared = int(length * CACHED_SHARE)
    prompt = prompts.make(length)

    def uncached() -> float:
        prompt[:] = prompts.make(length)
        return engine.ttft_s(list(prompt)) * 1e3

    def cached() -> float:
        return engine.ttft_s(prompt[:shared] + prompts.make(length - shared)) * 1e3

    case, (limit, aim) = f"TTFT, {length} tokens", PREFIX_BOUNDS
    report.add(case, "ms", interleave(args.rounds, {UNCACHED: uncached, CACHED: cached}, case))
    report.compare(case, CACHED, UNCACHED, better=Better.LOWER, limit=limit, aim=aim)


def add_parts(report: Report, engine: EngineContender, args: argparse.Namespace) -> None:
    """Where the time of a step goes."""
    for batch in args.batches:
        parts = engine.step_parts(batch, PROMPT_TOKENS, args.tokens)
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        report.add(f"a step of batch {batch}", "CPU ms", {name: [milliseconds] for name, milliseconds in ordered})


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything."""
    report = Report(
        "decode_throughput",
        "How fast does the engine decode and prefill, beside the model library that its models come from?",
        {
            "model": arguments.model.name,
            "dtype": arguments.dtype.value,
            "threads": 1,
            "prompt tokens of a decode": PROMPT_TOKENS,
            "steps of a decode at most": arguments.tokens,
            "processor features": torch.backends.cpu.get_cpu_capability(),
        },
    )
    torch.set_num_threads(1)
    library = LibraryContender(arguments.model, arguments.dtype, Prompts(1000))
    prompts = Prompts(1000)
    engine = EngineContender(arguments.model, arguments.dtype, prompts)
    try:
        engine.decode_rate(min(arguments.batches), PROMPT_TOKENS, 4)  # the first steps choose code and touch memory
        add_decodes(report, engine, library, arguments)
        add_prefills(report, engine, library, arguments)
        add_prefix(report, engine, prompts, arguments)
        add_parts(report, engine, arguments)
    finally:
        engine.close()
    return report


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo.folder(), help="Hugging Face folder (%(default)s)")
    parser.add_argument("--dtype", type=Dtype, choices=(Dtype.BFLOAT16, Dtype.FLOAT32), default=Dtype.BFLOAT16)
    parser.add_argument("--batches", type=int, nargs="+", default=sorted(BOUNDS), help=f"at most {MAX_SEQUENCES} each")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps of a sample (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="after which the library stops early (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024], help="prompt tokens of prefills")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each contender (%(default)s)")
    parser.add_argument("--prefill-rounds", type=int, default=1, help="likewise, of prefills (%(default)s)")
    output_options(parser)
    return parser


def main() -> None:
    """Read the command line, measure, publish."""
    arguments = options().parse_args()
    publish(run(arguments), arguments.out)


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
