"""`n`: several choices of one prompt, streamed or not; each ends by itself, and one that fails ends all."""

import asyncio
import json

import httpx
import pytest

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor
from twostroke.protocol.errors import InternalRequestError

SURFACES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", SURFACES)
async def test_choices_carry_their_index_and_the_prompt_counts_once(
    path: str, http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """One request to the executor; completion tokens are summed, prompt and cached tokens are not."""
    executor.script.cached_tokens = 1
    answer = (await http.post(path, json={**SURFACES[path], "n": 3, "seed": 5})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    [request] = executor.calls.requests
    assert (request.n, request.sampling.seed) == (3, 5)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_ids) // 4
    assert usage["completion_tokens"] == 9
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert executor.calls.aborts == []


@pytest.mark.parametrize("path", SURFACES)
async def test_a_stream_carries_all_choices(path: str, http: httpx.AsyncClient) -> None:
    """Every index begins and ends once; the counts are those of the whole answer."""
    body = {**SURFACES[path], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    text = (await http.post(path, json=body)).text
    *chunks, done = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    choices = [choice for chunk in map(json.loads, chunks) for choice in chunk["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1]
    assert json.loads(chunks[-1])["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "tell_every"), [({}, 64), ({"logprobs": 1}, 64), ({"stream": True}, 1), ({"stop": "x"}, 1)]
)
async def test_only_what_nobody_reads_before_its_end_is_told_together(
    fields: dict[str, object], tell_every: int, http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """A stream shows each token, and a stop string is looked for in each."""
    await http.post("/v1/completions", json={"prompt": "hi", **fields})
    assert [request.tell_every for request in executor.calls.requests] == [tell_every]


async def test_choices_of_several_prompts_stand_prompt_by_prompt(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """Two prompts with two choices each: four choices, each prompt counted once."""
    answer = (await http.post("/v1/completions", json={"prompt": [[5], [6, 7]], "n": 2, "echo": True})).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 4
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert [request.n for request in executor.calls.requests] == [2, 2]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_a_stop_string_ends_one_index(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """The executor is told which."""
    whole = (await http.post("/v1/completions", json={"prompt": "hi"})).json()["choices"][0]["text"]
    executor.script.hold = 2
    answer = (await http.post("/v1/completions", json={"prompt": "hi", "n": 2, "stop": whole[1:2]})).json()
    assert [choice["text"] for choice in answer["choices"]] == [whole[:1]] * 2
    client_id = executor.calls.requests[-1].key.client_id
    assert set(executor.calls.completed) == {(client_id, 0), (client_id, 1)}


async def test_a_choice_that_fails_ends_the_answer(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """One error, and nothing goes on behind it."""
    executor.script.error = InternalRequestError("broken")
    answer = await http.post("/v1/completions", json={"prompt": "hi", "n": 3})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "broken")
    assert executor.running == 0


async def test_the_deadline_ends_all_choices(make_app: MakeApp, executor: FakeExecutor) -> None:
    """Every one of them with the deadline, and the executor is told once."""
    executor.script.hold = 0
    transport = httpx.ASGITransport(make_app(request_timeout_s=0.05))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        answer = await asyncio.wait_for(client.post("/v1/completions", json={"prompt": "hi", "n": 3}), 5)
    assert answer.status_code == 504
    assert executor.calls.aborts == [(executor.calls.requests[0].key.client_id, None)]
    assert executor.running == 0


@pytest.mark.parametrize(("field", "value"), [("n", 0), ("n", -1), ("n", 5), ("n", "two"), ("best_of", 3)])
@pytest.mark.parametrize("path", SURFACES)
async def test_what_is_not_served_is_refused_by_name(
    path: str, field: str, value: object, make_app: MakeApp, executor: FakeExecutor
) -> None:
    """`n` has a bound by option; `best_of` points to `n`."""
    transport = httpx.ASGITransport(make_app(max_n=4))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        answer = await client.post(path, json={**SURFACES[path], field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "n" in answer.json()["error"]["message"]
    assert executor.calls.requests == []


async def test_choices_count_against_the_limit(make_app: MakeApp) -> None:
    """Two places, three choices: 429."""
    transport = httpx.ASGITransport(make_app(max_in_flight=2))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        assert (await client.post("/v1/completions", json={"prompt": "hi", "n": 3})).status_code == 429
        assert (await client.post("/v1/completions", json={"prompt": "hi", "n": 2})).status_code == 200
