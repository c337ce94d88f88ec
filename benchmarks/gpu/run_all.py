"""All GPU benchmarks in one run of under 8 minutes on one GPU: one JSON file, one table.

    python -m benchmarks.gpu.run_all [--parts kernels ...] [--budget 460] [--out FOLDER] [--rehearse]

    kernels             against torch in float64, on this GPU
    decode_attention    GB/s as a share of a copy within the device
    prefill_attention   TFLOP/s as a share of a bfloat16 matrix product
    model_steps         decode step time and prefill of a random-weight 8 B Llama, against what the GPU allows
    kv_transfer         KV between two processes over UCX, and what killing either does to the other
    interference        gaps between tokens while 8k prompts arrive, in one engine and in two roles

Each part is a process of its own with a deadline. One that fails is recorded, and the others go on. The JSON is written
after each part, so a run that is cut leaves what it has. `--rehearse` runs it all on the CPU with tiny sizes, which
shows that it would run, and nothing else. What it needs: see benchmarks/gpu/README.md.
"""

import argparse
import contextlib
import enum
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.gpu.findings import read_findings
from benchmarks.gpu.machine import Mode
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.report import Absence, Report, output_options, publish, save

NAME = "gpu"
_REPOSITORY = Path(__file__).parents[2]
_LAST_LINES = 12
_LEAST_S = 10.0
"""A part is not begun with less time left."""


_REHEARSAL = 4
"""A rehearsal may take so many times longer: it may share its processors with anything."""


class Outcome(enum.Enum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_BEGUN = "not begun"


class PartRun(msgspec.Struct, frozen=True):
    """What became of one part.

    Attributes:
        seconds: How long it took.
        last_lines: Of what it wrote to stderr, where it did not end well.
    """

    name: str
    outcome: Outcome
    seconds: float
    last_lines: list[str] = []


class GpuReport(Report):
    """All that the parts found, and how each ended."""

    parts: list[PartRun] = msgspec.field(default_factory=list)


def run_part(part: Part, mode: Mode, folder: Path, limit_s: float) -> PartRun:
    """Run one part in a process group of its own, which is gone when this returns."""
    if limit_s < _LEAST_S:
        return PartRun(part.name, Outcome.NOT_BEGUN, 0.0)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, mode.value, str(folder / f"{part.name}.json")]
    log = folder / f"{part.name}.log"
    start = time.monotonic()
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, cwd=_REPOSITORY, env=_environment(mode), stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            status = child.wait(min(part.deadline_s * (_REHEARSAL if mode is Mode.REHEARSE else 1), limit_s))
            outcome = Outcome.FAILED if status else Outcome.DONE
        except subprocess.TimeoutExpired:
            outcome = Outcome.TIMED_OUT
        finally:
            _end_group(child)
    lines = []
    if outcome is not Outcome.DONE:
        lines = [*log.read_text(errors="replace").splitlines()[-_LAST_LINES:], f"exit status {child.returncode}"]
    return PartRun(part.name, outcome, round(time.monotonic() - start, 1), lines)


def run_parts(parts: Sequence[Part], mode: Mode, budget_s: float, out: Path) -> GpuReport:
    """Run parts one after another; the JSON in `out` is written after each."""
    end = time.monotonic() + budget_s
    settings: dict[str, object] = {"mode": mode.value, "parts": [part.name for part in parts], **_versions()}
    report = GpuReport(NAME, "What do the kernels, the engine and the KV transfer reach on this GPU?", settings)
    with tempfile.TemporaryDirectory() as name:
        for part in parts:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            run = run_part(part, mode, Path(name), end - time.monotonic())
            take(report, run, read_findings(Path(name) / f"{part.name}.json"))
            print(f"{part.name}: {run.outcome.value} in {run.seconds} s", *run.last_lines, sep="\n", file=sys.stderr)
            save(report, out)
    return report


def take(report: GpuReport, run: PartRun, findings: Report | None) -> None:
    """Add what a part found, however it ended."""
    report.parts.append(run)
    if findings is not None:
        report.measurements += findings.measurements
        report.comparisons += findings.comparisons
        report.notes += [f"{run.name}: {note}" for note in findings.notes]
    if run.outcome is not Outcome.DONE:
        last = "; ".join(run.last_lines[-2:]) or "no time was left"
        report.absent.append(Absence(run.name, f"{run.outcome.value} after {run.seconds} s: {last}"))


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a part and of the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment(mode: Mode) -> dict[str, str]:
    """Of a part: this one's, and where it rehearses, Triton's interpreter."""
    extra = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if mode is Mode.REHEARSE else {}
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", **extra}


def _versions() -> dict[str, object]:
    """Which libraries, and which GPU and driver."""
    versions: dict[str, object] = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    if (asked := shutil.which("nvidia-smi")) is not None:
        command = [asked, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        versions["gpu"] = done.stdout.strip()
    return versions


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help="which, of all")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for all of them (%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    output_options(parser)
    options = parser.parse_args()
    mode = Mode.REHEARSE if options.rehearse else Mode.MEASURE
    report = run_parts([part for part in PARTS if part.name in options.parts], mode, options.budget, options.out)
    publish(report, options.out)
    sys.exit(any(run.outcome is not Outcome.DONE for run in report.parts))


if __name__ == "__main__":
    main()
