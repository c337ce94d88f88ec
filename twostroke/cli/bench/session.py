"""From settings to a report: opens the endpoint, runs, prints and writes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from twostroke.cli.bench.client import BenchClient, ClientOptions, first_model
from twostroke.cli.bench.connection import Target
from twostroke.cli.bench.report import print_summary, require_plotting, write_json, write_plot
from twostroke.cli.bench.run import RunPlan, run_load
from twostroke.cli.bench.statistics import Slo, summarise
from twostroke.cli.bench.workload import Work
from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run, as the command checked them; they are kept in the JSON file."""

    url: str
    model: str | None
    api_key_file: Path | None
    chat: bool
    ignore_eos: bool
    timeout_s: float
    concurrency: int | None
    rate: float | None
    requests: int | None
    duration_s: float | None
    warm_up: int
    prompt_tokens: str
    output_tokens: str
    trace: Path | None
    seed: int
    slo: str | None
    json_file: Path | None
    plot: Path | None


async def run(settings: Settings, works: Iterator[Work], warm_up: Iterator[Work]) -> bool:
    """Run and report; whether at least one request finished.

    Raises:
        ConfigError: A setting is wrong.
        TwostrokeError: The endpoint does not say which model it serves.
    """
    target = Target.parse(settings.url)
    slo = None if settings.slo is None else Slo.parse(settings.slo)
    if settings.plot is not None:
        require_plotting()
    key = _read_key(settings.api_key_file)
    model = settings.model or await first_model(target, key)
    options = ClientOptions(model, key, settings.chat, settings.ignore_eos, settings.timeout_s)
    plan = RunPlan(settings.concurrency, settings.requests, settings.duration_s, settings.warm_up)
    result = await run_load(BenchClient(target, options), works, warm_up, plan)
    summary = summarise(result.records, slo)
    if result.interrupted:
        Console(stderr=True).print("stopped by Ctrl-C; this was measured so far:")
    print_summary(Console(), summary)
    if settings.json_file is not None:
        shown = {name: _plain(value) for name, value in asdict(settings).items()} | {"model": model}
        write_json(settings.json_file, shown, summary, result.records, interrupted=result.interrupted)
    if settings.plot is not None:
        write_plot(settings.plot, result.records)
    return summary.done > 0


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}") from None
    if not lines:
        raise ConfigError(f"--api-key-file: {path} is empty")
    return lines[0]
