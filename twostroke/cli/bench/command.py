"""The options of `twostroke bench`, checked before the first request."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.bench.workload import LengthRange, PromptMaker, Work, limited, poisson, read_trace, synthetic
from twostroke.cli.errors import EXIT_FAILURE, reported
from twostroke.protocol.errors import ConfigError

DEFAULT_REQUESTS = 100
WARM_UP_SEED_OFFSET = 1_000_003
"""Warm-up prompts differ from the measured ones, which would else be found in the prefix cache."""


@reported
def bench(  # noqa: PLR0917 - typer passes options by name
    url: Annotated[str, typer.Option(help="Endpoint, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Served name (default: the first of /v1/models).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File whose first line is the API key.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat completions; the prompts are text.")] = False,  # noqa: FBT002
    concurrency: Annotated[int | None, typer.Option(min=1, max=4096, help="Closed loop: so many requests run.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals, so many a second.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many (default: 100, or the whole trace).")] = None,
    duration: Annotated[float | None, typer.Option(help="Start no request after so many seconds.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length, or a range LEAST:MOST drawn uniformly.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Likewise.")] = "64",
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL: output_tokens; prompt, prompt_ids or prompt_tokens; at_s.", metavar="FILE"),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Prompts of words instead of token ids.")] = False,  # noqa: FBT002
    vocab_size: Annotated[int, typer.Option(min=11, help="Token ids are drawn below it.")] = 1000,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs of full length; not all servers can.")] = True,  # noqa: FBT002
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, which are not measured.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    slo: Annotated[
        str | None, typer.Option(help="Limits in ms for the goodput: any of ttft, itl, tpot, e2e.", metavar="LIMITS")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture here; needs the extra `bench`.", metavar="FILE.png")
    ] = None,
) -> None:
    """Put load on an OpenAI-compatible endpoint and report what its users would feel.

    Latencies count from when a request was due. TTFT: to the first chunk; ITL: between chunks; TPOT: per output token
    after the first. A request is good if it keeps every limit of --slo; its ITL is the 99th percentile of its own
    gaps. Ctrl-C ends the run and reports what was measured until then.

    For example:

        twostroke bench --concurrency 8 --requests 200

        twostroke bench --rate 2.5 --duration 60 --prompt-tokens 64:512 --slo ttft=500,itl=50

        twostroke bench --trace trace.jsonl --json result.json --plot result.png
    """
    from twostroke.cli.bench import session  # noqa: PLC0415 - `twostroke router` does not need it

    maker = PromptMaker(vocab_size, text=text or chat)
    lengths = LengthRange.parse(prompt_tokens, "--prompt-tokens"), LengthRange.parse(output_tokens, "--output-tokens")
    if rate is not None and (concurrency is not None or not rate > 0):
        raise ConfigError("--rate: needs requests a second above 0, and no --concurrency beside it")
    if duration is not None and not duration > 0:
        raise ConfigError(f"--duration: needs seconds above 0, not {duration}")

    def works(from_seed: int) -> Iterator[Work]:
        given = synthetic(maker, *lengths, from_seed) if trace is None else iter(read_trace(trace, maker, from_seed))
        return given if rate is None else poisson(given, rate, from_seed)

    timed = trace is not None and next(works(seed)).due_s is not None
    if concurrency is None and rate is None and not timed:
        raise ConfigError("--concurrency or --rate: one is needed, unless a --trace says with `at_s` when to send")
    wanted = requests if requests or trace or duration else DEFAULT_REQUESTS
    settings = session.Settings(
        url=url,
        model=model,
        api_key_file=api_key_file,
        chat=chat,
        ignore_eos=ignore_eos,
        timeout_s=timeout,
        concurrency=concurrency,
        rate=rate,
        requests=wanted,
        duration_s=duration,
        warm_up=warm_up,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        trace=trace,
        seed=seed,
        slo=slo,
        json_file=json_file,
        plot=plot,
    )
    warm_up_works = synthetic(maker, *lengths, seed + WARM_UP_SEED_OFFSET)
    succeeded = asyncio.run(session.run(settings, limited(works(seed), wanted), warm_up_works))
    raise typer.Exit(0 if succeeded else EXIT_FAILURE)
