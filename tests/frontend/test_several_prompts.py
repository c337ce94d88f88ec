"""Several prompts in one completion request: a choice for each, and one end for all of them."""

import asyncio

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.waiting import until
from twostroke.protocol.errors import TransferError
from twostroke.protocol.tokens import unpack_tokens

TOKENIZER = tiny_tokenizer()
PROMPTS = ["one", "two more", "three"]


def events_of(answer: httpx.Response) -> list[dict[str, object]]:
    """The decoded events of a stream, without its end mark."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [msgspec.json.decode(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("form", ["texts", "token ids"])
async def test_each_prompt_gets_a_choice(openai: AsyncOpenAI, executor: FakeExecutor, form: str) -> None:
    """In the prompts' order, each a request of its own to the executor, with the same seed; counts are summed."""
    executor.script = Script(steps=[(40,), (41,)], cached_tokens=2)
    ids = [TOKENIZER.encode(prompt).ids for prompt in PROMPTS]
    prompt = PROMPTS if form == "texts" else ids
    answer = await openai.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    requests = executor.calls.requests
    assert [unpack_tokens(request.prompt_ids) for request in requests] == ids
    assert len({request.key.client_id for request in requests}) == 3
    assert len({request.sampling.seed for request in requests}) == 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [TOKENIZER.decode([40, 41])] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == sum(min(2, len(one)) for one in ids)


async def test_a_stream_tells_the_choices_apart_by_their_index(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """Pieces come as they are made; each choice has one finish reason, and the counts come once, at the end."""
    executor.script = Script(steps=[(40,), (41,), (42,)], pause_s=0.001)
    body = {"prompt": PROMPTS, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/completions", json=body)
    *chunks, counts = events_of(answer)
    choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index] # one choice a chunk
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TOKENIZER.decode([40, 41, 42])
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == 9  # type: ignore[index] # an object
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("[DONE]") == 1


async def test_continuous_counts_grow_with_the_stream(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """`continuous_usage_stats`: every chunk has the counts so far, the last one those of the whole."""
    executor.script = Script(steps=[(40,), (41,), (42,)], pause_s=0.001)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [5, 6], "stream": True, "stream_options": options}
    events = events_of(await http.post("/v1/completions", json=body))
    made = [event["usage"]["completion_tokens"] for event in events]  # type: ignore[index] # an object in every event
    assert made == sorted(made)
    assert (made[0], made[-1]) == (1, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_client_leaving_aborts_all(url: str, executor: FakeExecutor, *, stream: bool) -> None:
    """Nothing of the request goes on in the engine."""
    executor.script = Script(steps=[(40,), (41,)], hold=1)
    async with httpx.AsyncClient(base_url=url) as client:
        leaving = asyncio.create_task(client.post("/v1/completions", json={"prompt": PROMPTS, "stream": stream}))
        await until(lambda: executor.running == 3)
        leaving.cancel()
        await until(lambda: not executor.running)
    assert {client_id for client_id, _ in executor.calls.aborts} == {
        request.key.client_id for request in executor.calls.requests
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_ends_the_request_with_one_error(
    http: httpx.AsyncClient, executor: FakeExecutor, *, stream: bool
) -> None:
    """The other prompts' work is aborted; no choice is given out as if it were whole."""
    executor.script = Script(steps=[(40,), (41,)], hold=0)
    answering = asyncio.create_task(http.post("/v1/completions", json={"prompt": PROMPTS, "stream": stream}))
    await until(lambda: executor.running == 3)
    executor.fail(executor.calls.requests[1].key, TransferError("the cache could not be moved"))
    answer = await answering
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the cache could not be moved"
    assert executor.running == 0


async def test_an_executor_that_is_full_half_way_gets_its_work_back(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """The third prompt is refused: the first two are aborted, the client may try again."""
    executor.script = Script(steps=[(40,)], hold=0)
    executor.room = 2
    answer = await http.post("/v1/completions", json={"prompt": PROMPTS})
    assert (answer.status_code, executor.running, len(executor.calls.aborts)) == (503, 0, 2)


async def test_every_prompt_takes_a_place(make_app: MakeApp, executor: FakeExecutor) -> None:
    """The limit is one of work, not of connections."""
    transport = httpx.ASGITransport(make_app(max_in_flight=2))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        refused = await client.post("/v1/completions", json={"prompt": PROMPTS})
        taken = await client.post("/v1/completions", json={"prompt": PROMPTS[:2]})
    assert (refused.status_code, taken.status_code) == (429, 200)
    assert "the limit is 2" in refused.json()["error"]["message"]
    assert len(executor.calls.requests) == 2
