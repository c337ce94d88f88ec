"""The router as a process of its own, over scripted workers: ports, readiness, requests, signals."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.processes import wait_until
from tests.support.role_worker import running_worker
from tests.support.tiny_tokenizer import save_tiny_tokenizer
from twostroke.ipc.secret import new_secret, save_secret
from twostroke.ipc.supervise import READY_FD_VARIABLE, PartReady, decode_event
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster


@dataclass
class RouterProcess:
    """A router that announced itself."""

    process: subprocess.Popen[bytes]
    ready: PartReady

    def get(self, path: str, *, admin: bool = False) -> httpx.Response:
        """GET from the public or the admin port."""
        base = self.ready.admin if admin else self.ready.http
        return httpx.get(f"{base}{path}", timeout=5, trust_env=False)

    def complete(self, prompt: list[int], max_tokens: int = 4) -> httpx.Response:
        """POST a completion."""
        body = {"model": "normal", "prompt": prompt, "max_tokens": max_tokens}
        return httpx.post(f"{self.ready.http}/v1/completions", json=body, timeout=10, trust_env=False)


@contextmanager
def running_router(folder: Path, document: dict[str, object]) -> Iterator[RouterProcess]:
    """`twostroke router` with this configuration, once it is ready."""
    config = folder / "router.yaml"
    config.write_text(yaml.safe_dump(document))
    reader, writer = os.pipe()
    with (folder / "router.log").open("wb") as log, os.fdopen(reader, "rb") as events:
        process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.cli", "router", "--config", str(config)],
            env={**os.environ, READY_FD_VARIABLE: str(writer)},
            pass_fds=[writer],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        os.close(writer)
        try:
            # The pipe ends with the process; pytest's timeout covers a process that hangs.
            ready = next((event for event in map(decode_event, events) if isinstance(event, PartReady)), None)
            assert ready is not None, (folder / "router.log").read_text()
            yield RouterProcess(process, ready)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def secret() -> bytes:
    """The cluster's secret."""
    return new_secret()


@pytest.fixture
def document(tmp_path: Path, secret: bytes) -> dict[str, object]:
    """A router's configuration on free ports, with no workers yet."""
    save_secret(secret, tmp_path / "secret")
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # the router reads the text side only
    return {
        "model": {"path": str(tmp_path)},
        "router": {"port": 0},
        "security": {"secret_file": str(tmp_path / "secret")},
    }


def test_serves_and_stops(tmp_path: Path, secret: bytes, document: dict[str, object]) -> None:
    """Both ports answer, a request goes through both roles, SIGTERM ends the process and frees the ports."""
    with running_worker(Role.CONTEXT, secret) as context, running_worker(Role.GENERATION, secret) as generation:
        document["workers"] = {"context": [context.address], "generation": [generation.address]}
        with running_router(tmp_path, document) as router:
            assert router.get("/ready").status_code == 200
            assert router.get("/v1/models").json()["data"][0]["id"] == "normal"
            answer = router.complete([3, 4])
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
            assert (context.submitted, generation.submitted) == (1, 1)
            (entry,) = router.get("/ledger", admin=True).json()["ended"]
            assert (entry["phase"], entry["output_tokens"]) == ("done", 4)
            states = [worker["state"] for worker in router.get("/workers", admin=True).json()["workers"]]
            assert states == ["live", "live"]
            assert "twostroke_router_handover_seconds_count 1.0" in router.get("/metrics").text
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(10) == 0
            for url in (router.ready.http, router.ready.admin):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", httpx.URL(str(url)).port or 0))


def test_lost_worker_turns_it_unready(tmp_path: Path, secret: bytes, document: dict[str, object]) -> None:
    """Without its context worker the router answers 503 with `Retry-After` and turns unready; `/health` stays 200."""
    with running_worker(Role.CONTEXT, secret) as context, running_worker(Role.GENERATION, secret) as generation:
        document["workers"] = {"context": [context.address], "generation": [generation.address]}
        with running_router(tmp_path, document) as router:
            context.stop()
            wait_until(lambda: router.get("/ready").status_code == 503, 5, "the router is unready")
            answer = router.complete([3, 4])
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "no live context worker" in answer.json()["error"]["message"]
            assert router.get("/health").status_code == 200


def test_wrong_configuration_exits_with_2(tmp_path: Path, document: dict[str, object]) -> None:
    """No generation worker named: one line says so, and the exit status is 2."""
    config = tmp_path / "router.yaml"
    config.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "twostroke.cli", "router", "--config", str(config)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "workers.generation: the router needs at least one address" in run.stderr
