"""Probes in child processes: an answer, or what happened instead, and nothing left running."""

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest

from twostroke.cli.doctor.child import ChildProbe, run_probe
from twostroke.cli.doctor.facts import GpuFacts, ProbeFault, Protocol

ANSWER = """
import msgspec, os, sys
from twostroke.cli.doctor.child import answer_stream
with answer_stream() as stream:
    print("a library talks")
    os.write(1, b"even in C")
    stream.write(msgspec.json.encode({"how": "said", "by": sys.argv[1]}))
"""
HANG = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["PID_FILE"], "w").write(f"{os.getpid()} {grandchild.pid}")
time.sleep(600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that can be run as the module `probe_under_test`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "probe_under_test.py"


def _run(deadline_s: float = 60, question: msgspec.Struct | None = None) -> Protocol | ProbeFault:
    return asyncio.run(run_probe(ChildProbe("probe_under_test", deadline_s, question), Protocol))


def test_an_answer_comes_through_the_chatter_of_libraries(module: Path) -> None:
    """The question goes in as JSON; only the answer comes out."""
    module.write_text(ANSWER)
    assert _run(question=GpuFacts("2.13", None)) == Protocol(
        "said", '{"torch":"2.13","cuda":null,"triton":false,"gpus":[],"unreachable":[]}'
    )


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("raise RuntimeError('no driver')", "failed with status 1: RuntimeError: no driver"),
        ("import sys; sys.exit(3)", "failed with status 3"),
        ("print('no json')", "gave no proper answer: JSON is malformed"),
        ('print(\'{"how": 3, "by": "x"}\')', "gave no proper answer: Expected `str`, got `int`"),
    ],
)
def test_a_crash_is_a_finding(module: Path, script: str, what: str) -> None:
    """With signal or status, and the last line that was said."""
    module.write_text(script)
    fault = _run()
    assert isinstance(fault, ProbeFault)
    assert fault.what.startswith(what)


def test_a_child_that_hangs_is_killed_with_all_that_it_started(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its deadline, which the finding names."""
    pid_file = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    module.write_text(HANG)
    assert _run(deadline_s=5) == ProbeFault("did not answer in 5 s and was killed")
    assert _all_gone(pid_file)


def test_an_interrupted_doctor_leaves_no_child(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C cancels the task that waits."""
    pid_file = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    module.write_text(HANG)

    async def interrupt() -> None:
        task = asyncio.create_task(run_probe(ChildProbe("probe_under_test", 60), Protocol))
        while not (pid_file.is_file() and pid_file.read_text()):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(interrupt(), 60))
    assert _all_gone(pid_file)


def _all_gone(pid_file: Path) -> bool:
    """Whether every process named in the file has ended; a grandchild may stay a zombie until init reaps it."""
    pids = [int(pid) for pid in pid_file.read_text().split()]
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return len(pids) == 2


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
