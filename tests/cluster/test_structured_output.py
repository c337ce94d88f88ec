"""JSON that follows its schema from real processes, in one role and in two, and the same tokens from both."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, running_cluster, running_server
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ENGINE = {"max_batched_tokens": 64, "max_sequences": 8, "kv_cache": {"block_size": 16, "num_blocks": 200}}
CONFIG = {"model": {"dtype": "float32"}, "context": ENGINE, "generation": ENGINE, "aggregated": {"port": 0, **ENGINE}}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    },
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "adopt", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
SEEDS = range(4)


def _ask(server: Cluster, **fields: object) -> dict[str, Any]:
    """One sampled chat; its only choice."""
    body = {"messages": [{"role": "user", "content": "Name a pet"}], "return_token_ids": True, "max_tokens": 350}
    answer = httpx.post(f"{server.http}/v1/chat/completions", json={**body, **fields}, timeout=60, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def _check(value: Any) -> None:
    """What the schema says."""
    assert set(value) == {"kind", "ages"}
    assert value["kind"] in {"cat", "dog"}
    assert len(value["ages"]) <= 3
    assert set(value["ages"]) <= {1, 22}


def _tokens(server: Cluster) -> list[list[int]]:
    """Tokens of answers that are all JSON under the schema, and of one forced call."""
    answers = [_ask(server, seed=seed, response_format=FORMAT) for seed in SEEDS]
    for answer in answers:
        assert answer["finish_reason"] == "stop"
        _check(json.loads(answer["message"]["content"]))
    called = _ask(server, seed=7, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "adopt"}})
    assert called["finish_reason"] == "tool_calls"
    [call] = called["message"]["tool_calls"]
    assert call["function"]["name"] == "adopt"
    _check(json.loads(call["function"]["arguments"]))
    wrong = httpx.post(
        f"{server.http}/v1/completions", json={"prompt": "x", "guided_regex": "("}, timeout=60, trust_env=False
    )
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "guided_regex")
    return [answer["token_ids"] for answer in (*answers, called)]


def test_json_follows_its_schema_whatever_the_roles(tmp_path: Path) -> None:
    """A random model would say anything; its sampled tokens are valid, and equal from one worker and from two."""
    folder = save_tiny_model(tmp_path / "tiny", vocab_size=VOCAB_SIZE, eos_token_id=0, max_position_embeddings=1024)
    save_tiny_tokenizer(folder)
    with running_server(folder, tmp_path / "one", CONFIG) as server:
        aggregated = _tokens(server)
    with running_cluster(folder, tmp_path / "two", CONFIG) as cluster:
        assert _tokens(cluster) == aggregated
        cluster.wait_idle()
