"""Most tokens take a short way to the client: it writes what the long way does, and only where nothing else is told."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import msgspec
import pytest
from starlette.applications import Starlette

from tests.frontend.conftest import MakeApp
from tests.frontend.test_direct_connection import Connection
from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.waiting import until
from twostroke.frontend.short_way import ShortWay
from twostroke.protocol.errors import TransferError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": [5]}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
STEPS = [[token] for token in tiny_tokenizer().encode('The "capital" of Fränce, 日本 and 😀.').ids]


class Way:
    """Counts how often the short way was taken; may be shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.shut = False
        take = ShortWay.take

        def counted(way: ShortWay) -> bool:
            took = not self.shut and take(way)
            self.taken += took
            return took

        monkeypatch.setattr(ShortWay, "take", counted)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    """The way, not shut."""
    return Way(monkeypatch)


async def stream(app: Starlette, path: str, body: Mapping[str, object]) -> str:
    """The events of one answer but for what differs from one to the next."""
    connection = Connection(msgspec.json.encode({"stream": True, "max_tokens": 60, **body}), writable=True)
    async with asyncio.timeout(10):
        await app(connection.scope(path), connection.receive, connection.send)
    return re.sub(r'"(chat)?cmpl-\w+"|"created":\d+', "", b"".join(connection.written).decode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, PROMPT),
        (CHAT, MESSAGES),
        (COMPLETIONS, {**PROMPT, "stream_options": {"include_usage": True}}),
        (CHAT, {**MESSAGES, "stream_options": {"include_usage": True}}),
    ],
)
async def test_both_ways_write_the_same(
    make_app: MakeApp, executor: FakeExecutor, way: Way, path: str, body: dict[str, object]
) -> None:
    """Quotes, characters of several tokens, tokens that come together; and the counts at the end."""
    app = make_app()
    for together in (1, 3):
        steps = [list(chain.from_iterable(STEPS[n : n + together])) for n in range(0, len(STEPS), together)]
        executor.script = Script(steps=steps, pause_s=0.001)
        way.taken, way.shut = 0, False
        short = await stream(app, path, body)
        way.shut = True
        assert await stream(app, path, body) == short
        assert len(steps) // 2 < way.taken <= len(steps) - 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**PROMPT, "logprobs": 1}),
        (COMPLETIONS, {**PROMPT, "stop": "zzz"}),
        (COMPLETIONS, {**PROMPT, "n": 2}),
        (COMPLETIONS, {**PROMPT, "echo": True}),
        (COMPLETIONS, {**PROMPT, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": [[5], [6]]}),
        (CHAT, {**MESSAGES, "logprobs": True}),
        (CHAT, {**MESSAGES, "tools": [TOOL]}),
        (CHAT, {**MESSAGES, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ],
)
async def test_what_tells_more_than_text_goes_the_long_way(
    make_app: MakeApp, executor: FakeExecutor, way: Way, path: str, body: dict[str, object]
) -> None:
    """Nothing of it may be lost."""
    executor.script = Script(steps=STEPS[:6], pause_s=0.001)
    executor.served = replace(executor.served, max_model_len=1024)
    assert "[DONE]" in await stream(make_app(tool_family="hermes"), path, body)
    assert way.taken == 0


async def test_what_came_while_the_client_did_not_read_goes_the_long_way(
    make_app: MakeApp, executor: FakeExecutor, way: Way
) -> None:
    """The reader waits for the client; after that the way is open again."""
    executor.script = Script(steps=STEPS, hold=3, pause_s=0.001)
    connection = Connection(msgspec.json.encode({**PROMPT, "stream": True, "max_tokens": 60}), writable=True)
    answering = asyncio.create_task(make_app()(connection.scope(), connection.receive, connection.send))
    await until(lambda: way.taken == 2)
    connection.writable = False
    executor.release()
    await until(lambda: len(connection.written) > 3)
    assert way.taken == 2
    connection.writable = True
    async with asyncio.timeout(10):
        await answering
    assert way.taken > 2


async def test_the_first_event_comes_first(make_app: MakeApp, executor: FakeExecutor, way: Way) -> None:
    """Even if comments began the stream, and the first token has no text by itself: the role before any word."""
    half = [[token] for token in tiny_tokenizer().encode("日").ids[:1]]
    executor.script = Script(steps=[*half, *STEPS], hold=0)
    body = msgspec.json.encode({**MESSAGES, "stream": True, "max_tokens": 60})
    connection = Connection(body, writable=True)
    app = make_app(keep_alive_s=0.02)
    answering = asyncio.create_task(app(connection.scope(CHAT), connection.receive, connection.send))
    await until(lambda: connection.written)
    executor.release()
    async with asyncio.timeout(10):
        await answering
    events = [part for part in b"".join(connection.written).decode().split("\n\n") if part.startswith("data: {")]
    assert ['"role":"assistant"' in event for event in events[:3]] == [True, False, False]
    assert way.taken > 0


async def test_a_failure_comes_after_the_tokens_before_it(make_app: MakeApp, executor: FakeExecutor, way: Way) -> None:
    """Its event is the last."""
    executor.script = Script(steps=STEPS[:5], error=TransferError("the cache could not be moved"), pause_s=0.001)
    events = (await stream(make_app(), COMPLETIONS, PROMPT)).removesuffix("\n\n").split("\n\n")
    assert way.taken == 4
    assert [event.startswith('data: {"error"') for event in events] == [False] * (len(events) - 1) + [True]
