"""Comments in a silent stream: proxies between would cut it during a long prefill."""

import asyncio

import httpx
from starlette.types import Message, Receive, Scope, Send

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor, Script
from tests.support.waiting import until
from twostroke.protocol.errors import TransferError

BODY = {"prompt": "x", "stream": True}
COMMENT = ": keep-alive\n\n"


class Commented:
    """An application that comments often, and its client.

    Attributes:
        comments: How many it has sent.
    """

    def __init__(self, make_app: MakeApp, keep_alive_s: float = 0.02) -> None:
        self.comments = 0
        self._app = make_app(keep_alive_s=keep_alive_s)
        transport = httpx.ASGITransport(self._serve)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://frontend")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            self.comments += message.get("body", b"").count(COMMENT.encode())
            await send(message)

        await self._app(scope, receive, count)


async def test_a_long_prefill_is_commented(make_app: MakeApp, executor: FakeExecutor) -> None:
    """The comments come before the first event and change nothing of what follows."""
    executor.script = Script(steps=[(40,), (41,)], hold=0)
    app = Commented(make_app)
    async with app.client as client:
        answering = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: app.comments >= 2)
        executor.release()
        answer = await answering
    assert answer.status_code == 200
    comments, events = answer.text.count(COMMENT), answer.text.replace(COMMENT, "")
    assert comments >= 2
    assert answer.text.startswith(COMMENT * 2)
    assert events.startswith("data: ")
    assert events.endswith("data: [DONE]\n\n")


async def test_a_silence_between_tokens_is_commented_too(make_app: MakeApp, executor: FakeExecutor) -> None:
    """A hand-over or a preemption may take as long as a prefill."""
    executor.script = Script(steps=[(40,), (41,)], hold=1)
    app = Commented(make_app)
    async with app.client as client:
        answering = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: app.comments >= 2)
        executor.release()
        answer = await answering
    first, *_, last = answer.text.replace("\n\n", "\n\n\0").split("\0")[:-1]
    assert first.startswith("data: {")
    assert last == "data: [DONE]\n\n"
    assert answer.text.count(COMMENT) >= 2


async def test_a_failure_after_a_comment_is_an_event(make_app: MakeApp, executor: FakeExecutor) -> None:
    """The comment has sent the status already."""
    executor.script = Script(steps=[(40,)], hold=0)
    app = Commented(make_app)
    async with app.client as client:
        answering = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: app.comments >= 2)
        executor.fail(executor.calls.requests[0].key, TransferError("the cache could not be moved"))
        answer = await answering
    assert answer.status_code == 200
    assert answer.text.count('data: {"error"') == 1
    assert answer.text.rstrip().endswith("}")


async def test_a_stream_that_flows_has_no_comment(make_app: MakeApp, executor: FakeExecutor) -> None:
    """Nor has an answer that is not streamed, however long it takes."""
    executor.script = Script(steps=[(40,)] * 15, pause_s=0.08)
    async with Commented(make_app, keep_alive_s=1.0).client as client:
        streamed = await client.post("/v1/completions", json=BODY)
    async with Commented(make_app).client as client:
        whole = await client.post("/v1/completions", json={**BODY, "stream": False})
    assert COMMENT not in streamed.text
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
