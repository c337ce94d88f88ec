"""What every benchmark here does alike: rounds in turn, medians, a table, a JSON file and a picture.

    contenders --interleave()--> samples, one a round and contender
    samples --Report.add()--> measurements --Report.compare()--> ratios against what was promised
    Report --publish()--> table on the terminal, NAME.json and NAME.png in the output folder

The machines are noisy, and their noise drifts: contenders take turns within each round, and a ratio is the median of
the rounds' ratios, so that both sides of it saw the same machine.
"""

import argparse
import enum
import importlib
import importlib.util
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
VERSION = 1
Sample = TypeVar("Sample")
_BAR_INCHES = 0.32


class Better(enum.Enum):
    """Which way is good."""

    LOWER = "lower"
    HIGHER = "higher"


class Verdict(enum.Enum):
    """How a ratio stands to what was promised."""

    AIM = "aim reached"
    LIMIT = "within the limit"
    MISSED = "missed"


class Measurement(msgspec.Struct, frozen=True):
    """One figure of one contender.

    Attributes:
        case: What was measured, for example `per request`.
        contender: Who was measured.
        unit: Of the samples, for example `us`.
        samples: One a round, in order.
    """

    case: str
    contender: str
    unit: str
    samples: list[float]

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.samples)


class Comparison(msgspec.Struct, frozen=True):
    """Two contenders' figures set against each other.

    Attributes:
        ratio: Median of the rounds' `ours / peer`.
        limit: What the ratio must keep.
        aim: What it should reach.
    """

    case: str
    ours: str
    peer: str
    ratio: float
    better: Better
    limit: float
    aim: float
    verdict: Verdict


class Absence(msgspec.Struct, frozen=True):
    """A contender that could not be measured here, and why."""

    contender: str
    reason: str


class Machine(msgspec.Struct, frozen=True):
    """Where the figures come from.

    Attributes:
        load: Mean number of runnable processes in the minute before the run.
    """

    processor: str
    cores: int
    python: str
    load: float

    @classmethod
    def here(cls) -> "Machine":
        """This machine, now."""
        return cls(_processor(), os.cpu_count() or 1, platform.python_version(), round(os.getloadavg()[0], 2))


class Report(msgspec.Struct):
    """All that one benchmark found.

    Attributes:
        name: The script's, and of the files.
        question: What the script answers, in a sentence.
        settings: Sizes and rounds of the run.
        notes: What a reader has to know beside the figures.
    """

    name: str
    question: str
    settings: dict[str, object]
    machine: Machine = msgspec.field(default_factory=Machine.here)
    measurements: list[Measurement] = []
    comparisons: list[Comparison] = []
    absent: list[Absence] = []
    notes: list[str] = []
    version: int = VERSION

    def add(self, case: str, unit: str, samples: Mapping[str, Sequence[float]]) -> None:
        """Take the samples of each contender for one case."""
        self.measurements += [Measurement(case, name, unit, list(values)) for name, values in samples.items()]

    def of(self, case: str, contender: str) -> Measurement:
        """The measurement of one contender.

        Raises:
            KeyError: There is none.
        """
        for measurement in self.measurements:
            if (measurement.case, measurement.contender) == (case, contender):
                return measurement
        raise KeyError(f"{contender} was not measured for {case!r}")

    def compare(self, case: str, ours: str, peer: str, *, better: Better, limit: float, aim: float) -> Comparison:
        """Set two contenders of one case against each other; the pairs are the rounds.

        Raises:
            KeyError: One of them was not measured.
            ValueError: They have unlike numbers of rounds.
        """
        pairs = zip(self.of(case, ours).samples, self.of(case, peer).samples, strict=True)
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        comparison = Comparison(case, ours, peer, ratio, better, limit, aim, _verdict(ratio, better, limit, aim))
        self.comparisons.append(comparison)
        return comparison


def interleave(rounds: int, contenders: Mapping[str, Callable[[], Sample]], what: str) -> dict[str, list[Sample]]:
    """Measure all contenders in turn, round by round.

    Args:
        rounds: Samples of each.
        contenders: Each call measures once; what it returns may hold several figures of one turn.
        what: Stands beside the progress bar.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    turns = [(name, measure) for _ in range(rounds) for name, measure in contenders.items()]
    for name, measure in track(turns, description=what, console=Console(stderr=True), transient=True):
        samples[name].append(measure())
    return samples


def output_options(parser: argparse.ArgumentParser) -> None:
    """Add `--out`, which `publish` wants."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and PNG files (%(default)s)")


def save(report: Report, out: Path) -> None:
    """Write `NAME.json` into `out`; a reader finds the old one or the new one, never a part."""
    out.mkdir(parents=True, exist_ok=True)
    document = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    beside = out / f"{report.name}.json.tmp"
    beside.write_bytes(document)
    beside.replace(out / f"{report.name}.json")


def publish(report: Report, out: Path) -> None:
    """Print the table, and write `NAME.json` and, where matplotlib is installed, `NAME.png` into `out`."""
    console = Console()
    _print(console, report)
    save(report, out)
    written = f"written: {out / report.name}.json"
    if report.measurements and importlib.util.find_spec("matplotlib") is not None:
        _draw(report, out / f"{report.name}.png")
        written += " and .png"
    console.print(written, highlight=False)


def _verdict(ratio: float, better: Better, limit: float, aim: float) -> Verdict:
    sign = 1 if better is Better.LOWER else -1
    if sign * ratio <= sign * aim:
        return Verdict.AIM
    return Verdict.LIMIT if sign * ratio <= sign * limit else Verdict.MISSED


def _print(console: Console, report: Report) -> None:
    console.print(f"[bold]{report.question}[/bold]", highlight=False)
    figures = Table("case", "contender", box=None)
    for name in ("median", "least", "most"):
        figures.add_column(name, justify="right")
    figures.add_column("unit")
    for one in report.measurements:
        cells = (f"{value:.4g}" for value in (one.median, min(one.samples), max(one.samples)))
        figures.add_row(one.case, one.contender, *cells, one.unit)
    console.print(figures)
    if report.comparisons:
        ratios = Table("case", "ours / peer", box=None)
        for name in ("ratio", "limit", "aim"):
            ratios.add_column(name, justify="right")
        ratios.add_column("")
        for pair in report.comparisons:
            sign = "<=" if pair.better is Better.LOWER else ">="
            bounds = (f"{pair.ratio:.2f}", f"{sign} {pair.limit:g}", f"{sign} {pair.aim:g}", pair.verdict.value)
            ratios.add_row(pair.case, f"{pair.ours} / {pair.peer}", *bounds)
        console.print(ratios)
    for absence in report.absent:
        console.print(f"[yellow]not measured: {absence.contender}: {absence.reason}")
    for note in report.notes:
        console.print(note, highlight=False)


def _draw(report: Report, path: Path) -> None:
    """One panel a unit, one group of bars a case; the thin line spans least to most."""
    matplotlib_figure: Any = importlib.import_module("matplotlib.figure")  # half a second that others need not pay

    units = list(dict.fromkeys(one.unit for one in report.measurements))
    names = list(dict.fromkeys(one.contender for one in report.measurements))
    panels = {unit: [one for one in report.measurements if one.unit == unit] for unit in units}
    heights = [len(panel) * _BAR_INCHES + 0.9 for panel in panels.values()]
    figure = matplotlib_figure.Figure(figsize=(10, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(report.question, fontsize=10)
    grid = figure.subplots(len(units), 1, squeeze=False, height_ratios=heights)
    for axes, (unit, panel) in zip(grid[:, 0], panels.items(), strict=True):
        places = range(len(panel))
        medians = [one.median for one in panel]
        below = [one.median - min(one.samples) for one in panel]
        above = [max(one.samples) - one.median for one in panel]
        colours = [f"C{names.index(one.contender) % 10}" for one in panel]
        axes.barh(places, medians, xerr=(below, above), color=colours, ecolor="0.3", height=0.75)
        axes.set_yticks(places, [f"{one.case}: {one.contender}" for one in panel], fontsize=8)
        axes.set(xlabel=unit, ylim=(len(panel) - 0.5, -0.5))
    figure.savefig(path, dpi=100)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
