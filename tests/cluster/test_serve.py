"""`twostroke serve` as a user starts it: one HTTP process, one real worker, a tiny random model."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.support.cluster import Cluster, running_server
from tests.support.processes import alive, children, wait_until
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

pytestmark = pytest.mark.cluster

MODEL = "tiny"
CONFIG = {"aggregated": {"port": 0, "threads": 1, "kv_cache": {"block_size": 4, "num_blocks": 256}}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the tiny tokenizer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / MODEL, vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A running server."""
    with running_server(model_dir, tmp_path, CONFIG) as started:
        yield started


def test_one_server_answers_leaves_nothing_and_stops(server: Cluster) -> None:
    """Streamed and whole answers agree; a client that left costs no block; SIGTERM ends everything with status 0."""
    with OpenAI(base_url=f"{server.http}/v1", api_key="any", max_retries=0) as client:
        ask = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0}
        whole = client.completions.create(**ask)  # type: ignore[call-overload] # fields by name
        chunks = list(client.completions.create(**ask, stream=True))  # type: ignore[call-overload] # likewise
        again = client.completions.create(**ask)  # type: ignore[call-overload] # likewise
        leaving = client.completions.create(
            model=MODEL, prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(leaving))
        leaving.close()
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == again.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert again.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens // 4 * 4
    wait_until(lambda: server.busy_blocks() == {}, 10, "all blocks are free or cached")

    (worker,) = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    wait_until(lambda: not alive(worker), 5, "the worker has ended")


def test_a_killed_worker_ends_the_stream_and_the_server(server: Cluster) -> None:
    """The client gets the text so far and one error event; the server says why, ends with 1, and leaves no process."""
    (worker,) = children(server.process.pid)
    body = {"prompt": "x", "max_tokens": 480, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.http}/v1/completions", json=body, timeout=30, trust_env=False) as answer:
        events: list[str] = []
        for line in answer.iter_lines():
            if line and not events:
                os.kill(worker, signal.SIGKILL)
            events += [line] if line else []
    assert [event for event in events if '"error"' in event] == events[-1:]
    assert "killed by signal 9" in events[-1] or "SIGKILL" in events[-1]
    assert server.process.wait(15) == 1
    assert "the worker died" in (server.log_dir / "serve.log").read_text()
