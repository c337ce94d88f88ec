"""Each request field gives the same answer in one process, through `twostroke serve` and through both roles.

Compared are whole answers over HTTP: tokens, text, logprobs (1e-4), finish reasons and usage. Each case has a prompt of
its own, of a length around the edges of blocks and chunks; all run at once, twice, so that the second round finds the
prompts in the prefix caches. Penalties and the like must also change the greedy answer, or they would prove nothing.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.support.cluster import running_cluster, running_server
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer, tiny_tokenizer
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.config import Dtype, EngineConfig, KVCacheConfig, ModelConfig
from twostroke.worker.in_process import InProcessExecutor

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

BLOCK, CHUNK, OUTPUT_TOKENS, SEED = 16, 64, 20, 31
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 200]
ENGINE = {
    "max_batched_tokens": CHUNK,
    "max_sequences": 8,
    "threads": 1,
    "kv_cache": {"block_size": BLOCK, "num_blocks": 600},
}
CONFIG = {"model": {"dtype": "float32"}, "context": ENGINE, "generation": ENGINE, "aggregated": {"port": 0, **ENGINE}}
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": OUTPUT_TOKENS}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "seed": {"temperature": 0.9, "seed": 11},
    "top_k": {"temperature": 1.3, "top_k": 7, "seed": -12},
    "top_p": {"temperature": 1.1, "top_p": 0.7, "seed": 13, "logprobs": 0},
    "min_p": {"temperature": 1.5, "min_p": 0.15, "seed": 14},
    "repetition_penalty below 1": {"repetition_penalty": 0.8},
    "all penalties": {
        "temperature": 0.8,
        "seed": 15,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
    },
    "end of sequence": {"ignore_eos": False, "logit_bias": {"0": 2.0}},
    "max_tokens 1": {"max_tokens": 1, "logprobs": 1},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "streamed echo": {"echo": True, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "prompt_logprobs 0": {"prompt_logprobs": 0, "repetition_penalty": 1.2},
}
"""What each case asks for beside `GREEDY`."""
_TOKENIZER = tiny_tokenizer()
READABLE = {
    str(token): 30
    for token in range(3, VOCAB_SIZE)
    if all((char.isalpha() and char.isascii()) or char == " " for char in _TOKENIZER.decode([token]) or "?")
}
"""A bias to letters and spaces, so that stop strings and bad words are not cut characters."""
FORCED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4, "logprobs": 1},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.5, "logprobs": 2},
}


CHAT = {
    "messages": [{"role": "user", "content": "How are you today? And you, and the dog?"}],
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_logprobs": 1,
    "presence_penalty": 0.7,
}


@dataclass(frozen=True)
class Case:
    """A request."""

    name: str
    body: dict[str, Any]
    path: str = "/v1/completions"


@dataclass(frozen=True)
class Suite:
    """All cases on one model, with the answers of one process in both rounds."""

    folder: Path
    cases: list[Case]
    rounds: list[list[Any]]


def derived_fields(tokens: list[int], text: str) -> dict[str, dict[str, Any]]:
    """Fields that are made for a greedy answer, to change it: no answer with them may be as it was."""
    first_word = _TOKENIZER.decode(tokens[:1]).strip() or "a"
    later = next(token for token in tokens[3:] if token not in tokens[:3])
    over_hand_over = _TOKENIZER.decode(tokens[:1])[-1] + _TOKENIZER.decode(tokens[1:2])[0]
    return {
        "logit_bias": {"logit_bias": {**READABLE, str(tokens[0]): -100}},
        "bad_words": {"bad_words": [first_word]},
        "bad_words sequence": {"bad_words": [_TOKENIZER.decode(tokens[1:3]), _TOKENIZER.decode(tokens[:2])]},
        "stop": {"stop": ["never comes", text[7:10]], "logprobs": 1},
        "stop over the hand-over": {"stop": over_hand_over},
        "include_stop_str_in_output": {"stop": text[5:8], "include_stop_str_in_output": True},
        "stop_token_ids": {"stop_token_ids": [later]},
        "include stop token": {"stop_token_ids": [later], "include_stop_str_in_output": True},
        "first token stops": {"stop_token_ids": tokens[:1], "logprobs": 1},
        "min_tokens": {"stop_token_ids": tokens[:4], "min_tokens": 9},
    }


def draw_cases(shift: int) -> tuple[list[Case], list[Case]]:
    """Cases that stand by themselves, and greedy ones from whose answers others are derived; prompts all differ.

    Args:
        shift: Moves the lengths on among the cases; over all shifts each case meets each length.
    """
    print(f"seed {SEED + shift}")
    draw = random.Random(SEED + shift)

    def body(number: int, fields: dict[str, Any]) -> dict[str, Any]:
        length = LENGTHS[(number + shift) % len(LENGTHS)]
        return {**GREEDY, "prompt": [draw.randrange(3, VOCAB_SIZE) for _ in range(length)], **fields}

    names = [*derived_fields(list(range(60, 80)), "x" * 20), *FORCED]
    plain = [Case(name, body(number, fields)) for number, (name, fields) in enumerate(FIELDS.items())]
    plain.append(Case("chat", {**GREEDY, **CHAT}, "/v1/chat/completions"))
    return plain, [Case(name, body(number, {"logit_bias": READABLE})) for number, name in enumerate(names, 3)]


def _apply(case: Case, answer: Any) -> Case:
    choice = answer["choices"][0]
    fields = {**derived_fields(choice["token_ids"], choice["text"]), **FORCED}[case.name]
    return Case(case.name, {**case.body, **fields})


async def _ask_all(client: httpx.AsyncClient, cases: list[Case], **more: object) -> list[Any]:
    """Every case at once, so that they meet in batches."""

    async def ask(case: Case) -> Any:
        answer = await client.post(case.path, json={**case.body, **more}, timeout=60)
        assert answer.status_code == httpx.codes.OK, f"{case.name}: {answer.text}"
        return _joined(answer.text) if case.body.get("stream") else answer.json()

    return list(await asyncio.gather(*map(ask, cases)))


def _joined(stream: str) -> Any:
    """The answer that a stream of completion chunks makes together."""
    *chunks, counts = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if "data: {" in line]
    text, ids = "", []
    scores: dict[str, list[Any]] = {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        text += choice["text"]
        ids += choice["token_ids"]
        for name, values in (choice["logprobs"] or {}).items():
            scores[name] = [*scores.get(name, []), *values]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    whole = {"text": text, "token_ids": ids, "logprobs": scores, "finish_reason": reason}
    return {"choices": [whole], "usage": counts["usage"]}


async def _in_process(folder: Path, shift: int) -> Suite:
    """Answers of the same HTTP application over an engine in this process."""
    engine = EngineConfig(
        max_batched_tokens=CHUNK, max_sequences=8, kv_cache=KVCacheConfig(block_size=BLOCK, num_blocks=600), threads=1
    )
    executor = InProcessExecutor.load(ModelConfig(path=str(folder), dtype=Dtype.FLOAT32), engine)
    app = create_app(executor, TextModel.load(folder), FrontendOptions(), CollectorRegistry())
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            plain, greedy = draw_cases(shift)
            # The salt keeps these prompts out of the way of the cases'.
            answers = await _ask_all(client, greedy, cache_salt="greedy")
            derived = list(map(_apply, greedy, answers))
            rounds = [await _ask_all(client, plain + derived) for _ in range(2)]
            for case, before, after in zip(derived, answers, rounds[0][len(plain) :], strict=True):
                assert before["choices"][0]["token_ids"] != after["choices"][0]["token_ids"], f"{case} changes nothing"
    finally:
        executor.shutdown()
    return Suite(folder, plain + derived, rounds)


WHOLE_MATRIX = [pytest.param(shift, marks=pytest.mark.long) for shift in range(1, len(LENGTHS))]


@pytest.fixture(scope="module", params=[0, *WHOLE_MATRIX], ids=lambda shift: f"lengths moved by {shift}")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A tiny random model, the cases, and what one process answers."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_tiny_model(folder, vocab_size=VOCAB_SIZE, eos_token_id=0)
    save_tiny_tokenizer(folder)
    return asyncio.run(_in_process(folder, request.param))


def _assert_same(path: str, expected: Any, found: Any) -> None:
    """Equal, but for floats, which may differ by 1e-4, and ranks, which neighbours with equal logprobs may swap."""
    match expected:
        case dict():
            assert expected.keys() == found.keys(), path
            for key in expected.keys() - {"id", "created"}:
                _assert_same(f"{path}.{key}", expected[key], found[key])
        case list():
            assert len(expected) == len(found), path
            for number, pair in enumerate(zip(expected, found, strict=True)):
                _assert_same(f"{path}[{number}]", *pair)
        case float():
            assert found == pytest.approx(expected, abs=1e-4), path
        case int() if path.endswith(".rank"):
            assert abs(expected - found) <= 1, path
        case _:
            assert expected == found, path


def _assert_answers(http: str, suite: Suite) -> None:
    async def ask() -> list[list[Any]]:
        async with httpx.AsyncClient(base_url=http, trust_env=False) as client:
            return [await _ask_all(client, suite.cases) for _ in range(2)]

    for name, expected, found in zip(("first", "cached"), suite.rounds, asyncio.run(ask()), strict=True):
        for case, *pair in zip(suite.cases, expected, found, strict=True):
            _assert_same(f"{case.name}, {name} round", *pair)


def test_one_process_answers_as_asked(suite: Suite) -> None:
    """What the cases are about really happens in the answers that the others are compared with."""
    choices = {case.name: answer["choices"][0] for case, answer in zip(suite.cases, suite.rounds[0], strict=True)}
    bodies = {case.name: case.body for case in suite.cases}
    usage = {case.name: answer["usage"] for case, answer in zip(suite.cases, suite.rounds[1], strict=True)}
    for name in ("stop", "stop over the hand-over", "stop_token_ids", "include stop token", "first token stops"):
        assert choices[name]["finish_reason"] == "stop", name
    stop = bodies["stop over the hand-over"]["stop"]
    assert len(choices["stop over the hand-over"]["token_ids"]) == 2
    assert stop not in choices["stop over the hand-over"]["text"]
    assert len(choices["first token stops"]["token_ids"]) == 1
    assert len(choices["min_tokens"]["token_ids"]) >= 9
    included = choices["include_stop_str_in_output"]
    assert included["text"].endswith(bodies["include_stop_str_in_output"]["stop"])
    assert choices["echo alone"]["finish_reason"] == "length"
    # A scored prompt is computed whole though the cache holds it; others find the full blocks before their last token.
    for name, counts in usage.items():
        length = counts["prompt_tokens"]
        scored = "prompt_logprobs" in bodies[name] or (bodies[name].get("echo") and "logprobs" in bodies[name])
        cached = 0 if scored else (length - 1) // BLOCK * BLOCK
        assert counts["prompt_tokens_details"]["cached_tokens"] == cached, name


def test_an_aggregated_server_answers_the_same(suite: Suite, tmp_path: Path) -> None:
    """`twostroke serve`."""
    with running_server(suite.folder, tmp_path, CONFIG) as server:
        _assert_answers(server.http, suite)


def test_two_roles_answer_the_same(suite: Suite, tmp_path: Path) -> None:
    """`twostroke up`: the context worker scores prompts and makes first tokens; afterwards all blocks are back."""
    with running_cluster(suite.folder, tmp_path, CONFIG) as cluster:
        _assert_answers(cluster.http, suite)
        cluster.wait_idle()
