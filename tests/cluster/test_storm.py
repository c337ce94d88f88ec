"""Storms: many requests of mixed shapes at once, clients that leave, and processes that are killed in the middle.

Whatever happens, each request has one final event; afterwards no block, lease or ledger entry is left, no process that
lived on has grown, and the next answer is right.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.processes import alive, command_line, descendants, wait_until
from tests.support.storm import Ending, draw_body, storm
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

pytestmark = [pytest.mark.cluster]

MODEL = "tiny"
FEW_BLOCKS = 160
PROBE = [5, 6, 7, 8]
RECOVERY_S = 120.0
WORLDS = ("context_server.worker", "generation_server.worker")
PARTS = (*WORLDS, "twostroke.cli context-server", "twostroke.cli generation-server", "twostroke.cli router")


def _config(contexts: int, generations: int) -> dict[str, Any]:
    engine = {"threads": 1, "shutdown_s": 5.0, "kv_cache": {"num_blocks": FEW_BLOCKS}}
    return {
        "model": {"served_name": MODEL},
        "context": {**engine, "replicas": contexts},
        "generation": {**engine, "replicas": generations},
    }


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer."""
    folder = save_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(folder)
    return folder


def _probe(cluster: Cluster) -> list[int]:
    """The greedy answer to one fixed prompt."""
    body = {"model": MODEL, "prompt": PROBE, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(
        f"{cluster.http}/v1/completions", json={**body, "return_token_ids": True}, timeout=30, trust_env=False
    )
    assert response.status_code == httpx.codes.OK, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def _kill(cluster: Cluster, part: str, draw: random.Random) -> Callable[[], None]:
    """Kills one process whose command has `part` in it, if there is one at that moment."""

    def kill() -> None:
        pids = [pid for pid in descendants(cluster.process.pid) if part in command_line(pid)]
        if pids:
            pid = draw.choice(pids)
            print(f"kill -9 {pid}: {part}")
            os.kill(pid, signal.SIGKILL)

    return kill


def _sizes(cluster: Cluster) -> dict[int, Counter[str]]:
    """Open files, threads and resident MiB of each process."""
    found = {}
    for pid in descendants(cluster.process.pid):
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names are not needed as paths
        except OSError:
            continue  # it ended while we looked
        megabytes = int(status["VmRSS"].split()[0]) // 1024
        found[pid] = Counter(files=files, threads=int(status["Threads"]), megabytes=megabytes)
    return found


def _assert_no_growth(before: dict[int, Counter[str]], after: dict[int, Counter[str]]) -> None:
    """Processes that lived through it hold no more than a few peers' connections and some buffers more."""
    for pid in before.keys() & after.keys():
        grown = {name: after[pid][name] - before[pid][name] for name in after[pid]}
        who = f"{command_line(pid)}: {grown}"
        assert grown["files"] <= 64, who
        assert grown["threads"] <= 4, who
        assert grown["megabytes"] <= 64, who


def _wait_all_live(cluster: Cluster) -> None:
    """Wait until also what was killed has loaded again: a worker that still loads grows."""

    def all_live() -> bool:
        try:
            return all(worker["state"] == "live" for worker in cluster.worker_states()["workers"])
        except httpx.TransportError:
            return False

    wait_until(all_live, RECOVERY_S, "every worker is live again")


def _assert_whole(cluster: Cluster, expected: list[int]) -> None:
    cluster.wait_ready(RECOVERY_S)
    cluster.wait_idle()
    assert cluster.ledger()["open"] == []
    assert all(worker["placed"] in (0, None) for worker in cluster.worker_states()["workers"])
    assert _probe(cluster) == expected


@pytest.mark.timeout(240)
def test_three_hundred_requests_and_a_killed_worker(model_dir: Path, tmp_path: Path) -> None:
    """A third of the clients leave, and one of two generation workers is killed in the middle."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with running_cluster(model_dir, tmp_path / "logs", _config(1, 2)) as cluster:
        expected = _probe(cluster)
        before = _sizes(cluster)
        bodies = [draw_body(draw, MODEL) for _ in range(300)]
        kill = _kill(cluster, "generation_server.worker", draw)
        outcome = storm(f"{cluster.http}/v1/completions", bodies, draw, {draw.randrange(80, 220): kill})
        endings = outcome.endings()
        assert outcome.wrong() == []
        assert endings[Ending.CUT] == 0
        assert endings[Ending.ANSWERED] >= 150, endings
        _assert_whole(cluster, expected)
        _assert_no_growth(before, _sizes(cluster))


@pytest.mark.long
@pytest.mark.timeout(720)
def test_ten_thousand_requests_and_many_deaths(model_dir: Path, tmp_path: Path) -> None:
    """Ten rounds; in each one process of every kind in turn is killed, the router included, and all recovers."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with running_cluster(model_dir, tmp_path / "logs", _config(2, 2)) as cluster:
        expected = _probe(cluster)
        before: dict[int, Counter[str]] = {}
        for number in range(10):
            part = PARTS[number % len(PARTS)]
            bodies = [draw_body(draw, MODEL) for _ in range(1000)]
            kills = {draw.randrange(200, 800): _kill(cluster, part, draw)}
            outcome = storm(f"{cluster.http}/v1/completions", bodies, draw, kills)
            print(f"round {number}: {part} killed, {outcome.endings()}")
            assert outcome.wrong() == []
            assert outcome.endings()[Ending.CUT] == 0 or "router" in part
            _wait_all_live(cluster)
            _assert_whole(cluster, expected)
            after = _sizes(cluster)
            _assert_no_growth(before, after)
            # Each process is compared with its first sight.
            before = {pid: before.get(pid, size) for pid, size in after.items() if alive(pid)}
