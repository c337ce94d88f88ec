"""Echoed prompts, logprobs of prompts, and stop strings that stay in the output."""

from typing import Any

import httpx
import msgspec
import pytest

from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import tiny_tokenizer
from twostroke.protocol.responses import FinishReason

TOKENIZER = tiny_tokenizer()
PROMPT = "The quick brown"
IDS = TOKENIZER.encode(PROMPT).ids
OUTPUT = " fox jumps"


def script_of(text: str, **fields: object) -> Script:
    """A token a step."""
    return Script(steps=[(token,) for token in TOKENIZER.encode(text).ids], **fields)  # type: ignore[arg-type] # by name


async def complete(http: httpx.AsyncClient, **fields: object) -> Any:
    """A completion; its first choice."""
    answer = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "token ids"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_begins_with_the_prompt(
    http: httpx.AsyncClient,
    executor: FakeExecutor,
    prompt: object,
    stream: bool,  # noqa: FBT001 - a case
) -> None:
    """The output counts as before; without logprobs the engine is not asked for any."""
    executor.script = script_of(OUTPUT)
    answer = await http.post(
        "/v1/completions", json={"prompt": prompt, "echo": True, "max_tokens": 50, "stream": stream}
    )
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
        text = "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events)
    else:
        text = answer.json()["choices"][0]["text"]
        assert answer.json()["usage"]["completion_tokens"] == len(TOKENIZER.encode(OUTPUT).ids)
    assert text == PROMPT + OUTPUT
    assert executor.calls.requests[0].sampling.prompt_logprobs is None


async def test_echoed_logprobs_cover_prompt_and_output(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """The first token has none; offsets point into the whole text."""
    executor.script = script_of(OUTPUT)
    answer = await complete(http, echo=True, logprobs=2)
    choice = answer["choices"][0]
    logprobs, output = choice["logprobs"], TOKENIZER.encode(OUTPUT).ids
    assert executor.calls.requests[0].sampling.prompt_logprobs == 2
    assert "".join(logprobs["tokens"]) == choice["text"] == PROMPT + OUTPUT
    assert logprobs["token_logprobs"] == [None, *(-t / 128 for t in IDS[1:]), *(-t / 100 for t in output)]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"<|endoftext|>": 0.0, "<|im_start|>": -1 / 128}
    starts = [len("".join(logprobs["tokens"][:n])) for n in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == starts
    assert "prompt_logprobs" not in choice


async def test_an_echo_may_be_all_that_is_asked_for(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """`max_tokens` of 0 scores the prompt: the one token that the engine makes is not shown."""
    executor.script = script_of(OUTPUT)
    answer = await complete(http, echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(IDS)
    assert answer["usage"]["completion_tokens"] == 0
    assert executor.calls.requests[0].sampling.max_tokens == 1
    refused = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})
    assert refused.status_code == 400


async def test_a_character_that_the_prompt_begins_ends_in_the_output(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """Token ids may cut a character in two: it comes whole, and once."""
    ids = TOKENIZER.encode("a€").ids
    executor.script = Script(steps=[(ids[-1],)])
    answer = await http.post("/v1/completions", json={"prompt": ids[:-1], "echo": True, "max_tokens": 1})
    assert answer.json()["choices"][0]["text"] == "a€"


async def test_prompt_logprobs_are_told_as_vllm_tells_them(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """By token id: the prompt's own token with its rank, and the likeliest; null for the first token."""
    executor.script = script_of(OUTPUT)
    choice = (await complete(http, prompt_logprobs=1))["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for position, (token, shown) in enumerate(zip(IDS[1:], others, strict=True), 1):
        own = {"logprob": -token / 128, "rank": position, "decoded_token": TOKENIZER.decode([token])}
        assert shown == {"0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|endoftext|>"}, str(token): own}
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 3}
    answer = (await http.post("/v1/chat/completions", json=chat)).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(shown) == 1 for shown in answer["prompt_logprobs"][1:])


async def test_echo_and_prompt_logprobs_each_show_their_own_number(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """The engine is asked once, for enough."""
    choice = (await complete(http, echo=True, logprobs=1, prompt_logprobs=3))["choices"][0]
    assert executor.calls.requests[0].sampling.prompt_logprobs == 3
    assert [len(shown or {}) for shown in choice["logprobs"]["top_logprobs"]][:3] == [0, 1, 1]
    assert all(len(shown) in {3, 4} for shown in choice["prompt_logprobs"][1:])


async def test_a_chat_does_not_echo(http: httpx.AsyncClient) -> None:
    """The message says where to go instead."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "echo": True}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(("include", "shown"), [(False, " fox"), (True, " fox jum")])
async def test_a_stop_string_is_part_of_the_output_if_asked_for(
    http: httpx.AsyncClient,
    executor: FakeExecutor,
    include: bool,  # noqa: FBT001 - a case
    shown: str,
) -> None:
    """What comes after it is dropped in both cases."""
    executor.script = script_of(" fox jumps over")
    choice = (await complete(http, stop=" jum", include_stop_str_in_output=include))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (shown, "stop")


@pytest.mark.parametrize(("include", "shown"), [(False, " fo"), (True, " fox")])
async def test_a_stop_token_is_part_of_the_output_if_asked_for(
    http: httpx.AsyncClient,
    executor: FakeExecutor,
    include: bool,  # noqa: FBT001 - a case
    shown: str,
) -> None:
    """Likewise; both count it."""
    stop = TOKENIZER.encode("x").ids[0]
    ids = [*TOKENIZER.encode(" fo").ids, stop]
    executor.script = Script(steps=[(token,) for token in ids], finish_reason=FinishReason.STOP, stop_token_id=stop)
    answer = await complete(http, stop_token_ids=[stop], include_stop_str_in_output=include)
    assert answer["choices"][0]["text"] == shown
    assert answer["usage"]["completion_tokens"] == len(ids)
