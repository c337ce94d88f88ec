"""The demo, as a newcomer meets it: one command, then a conversation."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch
import transformers

from tests.support.cluster import STOP_S, Cluster, running_cluster
from tests.support.processes import alive, descendants
from twostroke.cli.model import demo

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
QUESTION = "What is the capital of France?"
STORY = "The history of the city is long and full of changes. People came from the sea and from the hills. "
LENGTHS = [1, 7, 15, 16, 17, 31, 32, 33, 64, 100]
BFLOAT16_MARGIN = 0.5
"""Logits: four steps of bfloat16 at the size that this model's largest logits have. Also in docs/architecture.md."""


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


@pytest.mark.long
def test_bfloat16_tokens_stay_within_the_margin(cluster: Cluster) -> None:
    """Every greedy token is the library's likeliest after the same tokens, or within the margin that is documented.

    Prompts have lengths around block edges and run at once, twice: prefix hits and batches vary what is recomputed.
    """
    library: Any = transformers
    text = library.AutoTokenizer.from_pretrained(demo.folder()).encode(STORY * 6)
    prompts = [text[11 * number :][:length] for number, length in enumerate(LENGTHS)]
    model = library.AutoModelForCausalLM.from_pretrained(demo.folder(), dtype=torch.bfloat16)

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": demo.NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        url = f"{cluster.http}/v1/completions"
        answer = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60, trust_env=False).json()
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            outputs = list(threads.map(ask, prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output) == 24
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            assert float((logits.max(-1).values - chosen).max()) <= BFLOAT16_MARGIN, f"prompt of {len(prompt)} tokens"


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
