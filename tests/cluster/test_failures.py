"""What clients see, and what is left, when workers die and clients leave at the worst moments.

The demo model is slow enough here that every phase can be hit: a prompt of some hundred tokens prefills for a second.
A stopped (SIGSTOP) generation worker holds a request between its first token and its transfer for as long as we like.
"""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.cluster import Cluster, running_cluster
from tests.support.processes import wait_until
from twostroke.cli.model import demo

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LONG_PROMPT = "The history of the city is long and full of changes. " * 60
NEXT_PROMPT = "The capital of France is"
RECOVERY_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all: each test leaves it whole, which is a part of what is tested."""
    with running_cluster(demo.fetch(print), tmp_path_factory.mktemp("failures")) as running:
        yield running


def _body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": demo.NAME, "prompt": prompt, "temperature": 0, "max_tokens": 8, **more}


class Client(threading.Thread):
    """One streaming client in a thread of its own.

    Attributes:
        events: What followed each `data:`, in order.
        status: The HTTP status, once known.
    """

    def __init__(self, cluster: Cluster, prompt: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self._url = f"{cluster.http}/v1/completions"
        self._json = _body(prompt, stream=True, **more)
        self._leave = threading.Event()
        self.events: list[str] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        """Read the stream to its end, or until told to leave."""
        with httpx.stream("POST", self._url, json=self._json, timeout=60, trust_env=False) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if self._leave.is_set():
                    return
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                elif line.startswith("{"):
                    self.events.append(line)

    def leave(self) -> None:
        """Close the connection at the next line."""
        self._leave.set()

    def wait_tokens(self, count: int) -> None:
        """Wait until so many events have come."""
        wait_until(lambda: len(self.events) >= count or not self.is_alive(), 30, f"{count} events")

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The error bodies among the events."""
        parsed = [json.loads(event) for event in self.events if event != "[DONE]"]
        return [event["error"] for event in parsed if "error" in event]


def _assert_whole_again(cluster: Cluster) -> None:
    """All blocks free or cached, no open ledger entry, and the next request is right."""
    cluster.wait_ready(RECOVERY_S)
    cluster.wait_idle()
    assert cluster.ledger()["open"] == []
    deadline = time.monotonic() + RECOVERY_S
    while True:
        response = httpx.post(f"{cluster.http}/v1/completions", json=_body(NEXT_PROMPT), timeout=60, trust_env=False)
        if response.status_code == httpx.codes.OK or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert response.status_code == httpx.codes.OK, response.text
    assert "Paris" in response.json()["choices"][0]["text"]


def _phase(cluster: Cluster) -> str:
    """Phase of the one open request; empty if there is none."""
    entries = cluster.ledger()["open"]
    return str(entries[0]["phase"]) if entries else ""


def _wait_phase(cluster: Cluster, phase: str) -> None:
    wait_until(lambda: _phase(cluster) == phase, 30, f"the request is in phase {phase}")


def _abandon(cluster: Cluster, prompt: str, **more: Any) -> http.client.HTTPConnection:
    """Send a streaming request on a connection that the caller closes; nothing is read of the answer.

    No thread may wait on that connection: the kernel would keep it open, in spite of `close`, until the wait ends.
    """
    address = urlsplit(cluster.http)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    body = json.dumps(_body(prompt, stream=True, **more))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def test_a_killed_generation_worker_ends_the_request_with_one_error(cluster: Cluster) -> None:
    """`kill -9` while tokens stream: one error event, the end, then a new worker."""
    client = Client(cluster, NEXT_PROMPT, max_tokens=400, ignore_eos=True)
    client.wait_tokens(5)
    killed = cluster.kill_worker("generation")
    client.join(30)
    assert not client.is_alive()
    assert len(client.errors) == 1
    assert client.errors[0]["message"]
    wait_until(lambda: cluster.workers("generation") not in ([], [killed]), RECOVERY_S, "a new generation worker")
    _assert_whole_again(cluster)


def test_a_killed_context_worker_ends_the_request_with_one_error(cluster: Cluster) -> None:
    """`kill -9` during prefill, with no other context worker: one clear status, then a new worker."""
    client = Client(cluster, "Once. " + LONG_PROMPT)
    _wait_phase(cluster, "context")
    killed = cluster.kill_worker("context")
    client.join(60)
    assert not client.is_alive()
    assert client.status == httpx.codes.SERVICE_UNAVAILABLE or len(client.errors) == 1
    assert len(client.errors) == 1
    wait_until(lambda: cluster.workers("context") not in ([], [killed]), RECOVERY_S, "a new context worker")
    _assert_whole_again(cluster)


def test_a_client_that_leaves_during_prefill(cluster: Cluster) -> None:
    """The context worker drops the request; nothing stays."""
    connection = _abandon(cluster, "Twice. " + LONG_PROMPT)
    _wait_phase(cluster, "context")
    connection.close()
    wait_until(lambda: _phase(cluster) == "", 10, "the request left the ledger")
    assert cluster.ledger()["ended"][0]["phase"] == "cancelled"
    _assert_whole_again(cluster)


def test_a_client_that_leaves_during_the_transfer(cluster: Cluster) -> None:
    """The generation worker stands still between the first token and the transfer; the lease ends all the same."""
    generation = cluster.kill_worker("generation", signal.SIGSTOP)
    try:
        client = Client(cluster, "Thrice. " + NEXT_PROMPT, max_tokens=50)
        client.wait_tokens(1)
        _wait_phase(cluster, "handoff")
        connection = _abandon(cluster, "Four times. " + NEXT_PROMPT, max_tokens=50)
        wait_until(lambda: len(cluster.ledger()["open"]) == 2, 10, "both requests are open")
        connection.close()
        wait_until(lambda: len(cluster.ledger()["open"]) == 1, 10, "the abandoned request left the ledger")
    finally:
        os.kill(generation, signal.SIGCONT)
    client.join(60)
    assert not client.is_alive()
    assert client.events[-1] == "[DONE]" or len(client.errors) == 1
    _assert_whole_again(cluster)


def test_a_client_that_leaves_during_decode(cluster: Cluster) -> None:
    """The generation worker stops decoding for it; nothing stays."""
    client = Client(cluster, NEXT_PROMPT, max_tokens=400, ignore_eos=True)
    client.wait_tokens(5)
    assert _phase(cluster) == "generation"
    client.leave()
    wait_until(lambda: _phase(cluster) == "", 10, "the request left the ledger")
    assert cluster.ledger()["ended"][0]["phase"] == "cancelled"
    _assert_whole_again(cluster)
