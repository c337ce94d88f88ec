"""The figures as a table, JSON and a picture."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.statistics import MS, Summary
from twostroke.protocol.errors import ConfigError


class RequestFigures(msgspec.Struct):
    """One request in the JSON file; milliseconds, None where nothing came."""

    due_ms: float
    ttft_ms: float | None
    e2e_ms: float | None
    prompt_tokens: int
    output_tokens: int
    outcome: str
    error: str | None


class ResultFile(msgspec.Struct):
    """The JSON file.

    Attributes:
        settings: The options of the run.
        interrupted: It was stopped by Ctrl-C.
    """

    version: int
    settings: dict[str, object]
    interrupted: bool
    summary: Summary
    requests: list[RequestFigures]


def print_summary(console: Console, summary: Summary) -> None:
    """Two tables: latencies, then counts and rates."""
    latencies = Table("ms", *(f"[right]{name}" for name in ("mean", "p50", "p90", "p99", "max")), box=None)
    for column in latencies.columns[1:]:
        column.header, column.justify = str(column.header).removeprefix("[right]"), "right"
    named = {"TTFT": summary.ttft_ms, "ITL": summary.itl_ms, "TPOT": summary.tpot_ms, "end to end": summary.e2e_ms}
    for name, values in named.items():
        cells = (values.mean, values.p50, values.p90, values.p99, values.most) if values else ()
        latencies.add_row(name, *(f"{cell:.1f}" for cell in cells))
    counts = Table("", "", box=None, show_header=False)
    counts.add_row("requests", f"{summary.done} done, {summary.failed} failed, {summary.unfinished} unfinished")
    counts.add_row("time", f"{summary.wall_s:.1f} s")
    counts.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    counts.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    counts.add_row("tokens", f"{summary.prompt_tokens} in, {summary.output_tokens} out")
    if summary.goodput_per_s is not None and summary.good_share is not None:
        counts.add_row("goodput", f"{summary.goodput_per_s:.2f} requests/s, {summary.good_share:.1%} within the SLO")
    for kind, count in summary.errors.items():
        counts.add_row("error", f"{count} x {kind}")
    console.print(latencies)
    console.print(counts)


def write_json(
    path: Path,
    settings: dict[str, object],
    summary: Summary,
    records: Sequence[RequestRecord],
    *,
    interrupted: bool,
) -> None:
    """Write the figures, and those of each request."""
    begun = min((record.due for record in records), default=0.0)
    requests = [
        RequestFigures(
            due_ms=(record.due - begun) * MS,
            ttft_ms=_ms(record.ttft_s),
            e2e_ms=_ms(record.e2e_s),
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.tokens,
            outcome=record.outcome.value,
            error=record.error,
        )
        for record in records
    ]
    document = ResultFile(1, settings, interrupted, summary, requests)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def require_plotting() -> None:
    """Fail before the run rather than after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401, ICN001, PLC0415 - an extra
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'twostroke[bench]'") from None


def write_plot(path: Path, records: Sequence[RequestRecord]) -> None:
    """Distributions of TTFT and ITL, and output tokens over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(12, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    series = (
        (left, "TTFT", [r.ttft_s for r in records if r.ttft_s is not None]),
        (middle, "ITL", [gap for r in records for gap in r.itl_s]),
    )
    for axes, name, seconds in series:
        ordered = sorted(value * MS for value in seconds)
        axes.plot(ordered, [(number + 1) / len(ordered) for number in range(len(ordered))])
        axes.set(title=name, xlabel="ms", ylabel="share of values", ylim=(0, 1))
    begun = min((record.due for record in records), default=0.0)
    times = sorted(time - begun for record in records for time in record.chunk_times)
    seconds_count = int(times[-1]) + 1 if times else 1
    right.hist(times, bins=seconds_count, range=(0, seconds_count), histtype="step")
    right.set(title="chunks", xlabel="s", ylabel="chunks a second")
    figure.savefig(path, dpi=100)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MS
