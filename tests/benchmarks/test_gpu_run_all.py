"""The GPU's benchmarks, rehearsed: every part runs on the CPU, and nothing is imported that a GPU machine lacks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import fetch_wheels
from benchmarks.gpu.findings import Findings, read_findings
from benchmarks.gpu.machine import Mode
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.run_all import NAME, GpuReport, Outcome, PartRun, run_part, take
from benchmarks.report import Better, Verdict, save

REPOSITORY = Path(__file__).parents[2]
QUICK = (("prefill_attention",),)
REST = (("kernels", "decode_attention", "model_steps"), ("kv_transfer", "interference"))
"""Two halves that run side by side, to save time."""
NEVER = [
    "accelerate",
    "gguf",
    "httptools",
    "hypothesis",
    "libucxx",
    "llvmlite",
    "matplotlib",
    "numba",
    "prometheus_client",
    "pytest",
    "rmm",
    "starlette",
    "typer",
    "ucxx",
    "uvicorn",
    "uvloop",
]
"""Neither carried nor brought along by torch, triton and transformers, or not needed if it is."""
CASES = {
    "kernels": ("sampled tokens", "gather and scatter of heads"),
    "decode_attention": ("decode attention, 1 x 300 tokens, blocks of 16",),
    "prefill_attention": ("prefill attention, 10 after 20",),
    "model_steps": (
        "MFU, prefill of 40 tokens",
        "decode step, 3 x 20 tokens, whole step",
        "decode step, 3 x 20 tokens, replays",
    ),
    "kv_transfer": ("KV transfer, 256 KiB scattered", "kill -9 of the writer", "kill -9 of the reader"),
    "interference": ("gap between tokens, p99", "time to first token of a long prompt"),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("halves", [QUICK, pytest.param(REST, marks=pytest.mark.long)], ids=["quick", "rest"])
def test_a_rehearsal_runs_every_part(tmp_path: Path, halves: tuple[tuple[str, ...], ...]) -> None:
    """All parts end well and leave their figures in the JSON; kernels agree, survivors live, requests do not fail."""
    runs = [_start(half, tmp_path / half[0]) for half in halves]
    for run in runs:
        output, _ = run.communicate(timeout=380)
        assert run.returncode == 0, output
    for half in halves:
        report = _read(tmp_path / half[0])
        assert [(run.name, run.outcome) for run in report.parts] == [(name, Outcome.DONE) for name in half]
        measured = {one.case: one for one in report.measurements}
        assert not {case for name in half for case in CASES[name]} - set(measured)
        for part in half:
            if part in CHECKS:
                CHECKS[part](report)


def test_the_rehearsals_leave_no_part_out() -> None:
    """Each part is in one of them."""
    assert sorted(name for half in (*QUICK, *REST) for name in half) == sorted(part.name for part in PARTS)


def _check_kernels(report: GpuReport) -> None:
    for case in CASES["kernels"]:
        assert report.of(case, "wrong").samples == [0.0]
    verdicts = [one.verdict for one in report.comparisons if one.peer in {"allowed", "checked"}]
    assert verdicts
    assert set(verdicts) == {Verdict.AIM}


def _check_transfers(report: GpuReport) -> None:
    alive = {one.case: one.samples for one in report.measurements if one.unit.endswith("alive")}
    assert alive == {"kill -9 of the writer": [1.0], "kill -9 of the reader": [1.0]}
    assert " ".join(report.notes).count("all blocks as sent") == 2


def _check_interference(report: GpuReport) -> None:
    assert "failed, the first as" not in " ".join(report.notes)
    contenders = {one.contender for one in report.measurements if one.case == "gap between tokens, p99"}
    assert contenders == {"aggregated, chunk 64", "disaggregated"}


CHECKS: dict[str, Callable[[GpuReport], None]] = {
    "kernels": _check_kernels,
    "kv_transfer": _check_transfers,
    "interference": _check_interference,
}


def test_a_part_that_fails_is_recorded(tmp_path: Path) -> None:
    """With the last lines of its traceback; one without time left is not begun."""
    run = run_part(Part("no_such_part", 60.0), Mode.REHEARSE, tmp_path, 60.0)
    assert run.outcome is Outcome.FAILED
    assert "No module named 'benchmarks.gpu.no_such_part'" in " ".join(run.last_lines)
    assert run_part(PARTS[0], Mode.REHEARSE, tmp_path, 5.0).outcome is Outcome.NOT_BEGUN


def test_what_a_part_found_before_its_end_is_kept(tmp_path: Path) -> None:
    """Its file is whole at any moment, and the report in `out` after each part."""
    findings = Findings("one", tmp_path / "one.json")
    findings.add("case", "ms", {"a": [2.0], "b": [1.0]})
    findings.compare("case", "a", "b", better=Better.LOWER, limit=3.0, aim=1.0)
    findings.note("slow")
    report = GpuReport(NAME, "?", {})
    take(
        report,
        PartRun("one", Outcome.TIMED_OUT, 3.0, ["in here", "exit status -9"]),
        read_findings(tmp_path / "one.json"),
    )
    take(report, PartRun("two", Outcome.NOT_BEGUN, 0.0), read_findings(tmp_path / "two.json"))
    save(report, tmp_path)
    kept = _read(tmp_path)
    assert (kept.of("case", "a").median, kept.comparisons[0].ratio, kept.notes) == (2.0, 2.0, ["one: slow"])
    assert [(one.contender, one.reason) for one in kept.absent] == [
        ("one", "timed out after 3.0 s: in here; exit status -9"),
        ("two", "not begun after 0.0 s: no time was left"),
    ]


@pytest.mark.long
def test_nothing_is_imported_that_a_gpu_machine_lacks() -> None:
    """What is carried, and what torch, triton and transformers bring, is enough for every part."""
    modules = [f"benchmarks.gpu.{part.name}" for part in PARTS]
    modules += ["benchmarks.gpu.run_all", "benchmarks.gpu.role_process", "benchmarks.gpu.kv_end"]
    modules += ["twostroke.cli.doctor.transport_source", "twostroke.worker.transfer", "kvtransfer.ucx"]
    probe = f"import sys; sys.modules.update(dict.fromkeys({NEVER!r}))\nimport {', '.join(modules)}"
    run = subprocess.run(
        [sys.executable, "-c", probe], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr


def test_only_what_is_imported_is_carried() -> None:
    """And UCX without a binding, which is larger than the rest together."""
    names = {wheel.partition("==")[0] for wheel in fetch_wheels.WHEELS}
    assert {"libucx-cu13", "llguidance", "msgspec", "pyzmq", "structlog", "rich"} <= names
    assert not names & {"numba", "llvmlite", "ucxx-cu13", "torch"}
    assert all("==" in wheel for wheel in fetch_wheels.WHEELS)


def _start(parts: tuple[str, ...], out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--rehearse", "--budget", "370", "--out", str(out)]
    return subprocess.Popen(
        [*command, "--parts", *parts], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _read(out: Path) -> GpuReport:
    return msgspec.json.decode((out / f"{NAME}.json").read_bytes(), type=GpuReport)
