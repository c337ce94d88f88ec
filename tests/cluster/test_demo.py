"""The demo, as a newcomer meets it: one command, then a conversation."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from tests.support.cluster import STOP_S, Cluster, running_cluster
from tests.support.processes import alive, descendants
from twostroke.cli.model import demo

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo model behind a router, a context and a generation server."""
    folder = demo.fetch(print)
    with running_cluster(folder, tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    """The client library that people use, unchanged."""
    return openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="unused", max_retries=0, timeout=60)


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    """A chat completion, not streamed, says Paris, and counts its tokens."""
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_capital_of_france_streamed(client: openai.OpenAI) -> None:
    """The same, streamed: several chunks that join to the same answer, one finish reason, usage at the end."""
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert len(chunks) > 3
    assert reasons == ["stop"]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_go_on_with_a_text(client: openai.OpenAI) -> None:
    """The plain completions endpoint takes a text and goes on with it."""
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in answer.choices[0].text


def test_the_answer_took_both_roles(client: openai.OpenAI, cluster: Cluster) -> None:
    """The ledger names a context and a generation worker for a finished request, and no block stays busy."""
    model = client.models.list().data[0].id
    client.completions.create(model=model, prompt="One, two, three,", temperature=0, max_tokens=4)
    entry = cluster.ledger()["ended"][0]
    assert entry["phase"] == "done"
    assert entry["context_worker"]
    assert entry["generation_worker"]
    cluster.wait_idle()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """After Ctrl-C every process is gone within ten seconds, and the ports are free."""
    with running_cluster(demo.fetch(print), tmp_path) as cluster:
        pids = [cluster.process.pid, *descendants(cluster.process.pid)]
        assert len(pids) >= 6  # up, router, two servers and their workers
        files_before = {path.name for path in SHARED_MEMORY.iterdir()}
        seconds = cluster.stop()
        assert cluster.process.returncode == 0
        assert seconds < STOP_S
        assert [pid for pid in pids if alive(pid)] == []
        for url in (cluster.http, cluster.admin):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", urlsplit(url).port or 0))
        assert {path.name for path in SHARED_MEMORY.iterdir()} <= files_before
