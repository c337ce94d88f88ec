"""Streams on servers that take bytes without messages: the same events in the same order, and a client that leaves."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from starlette.types import Message

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor, Script
from tests.support.waiting import until
from twostroke.frontend import endpoint
from twostroke.frontend.exchange import DIRECT_CONNECTION, Headers
from twostroke.protocol.errors import TransferError

BODY = msgspec.json.encode({"prompt": [5], "stream": True, "max_tokens": 6})


class Connection:
    """Keeps what was written.

    Args:
        body: Of the request.
        writable: Whether it takes bytes at once.
        reads: Whether it takes them at all.
    """

    def __init__(self, body: bytes = BODY, *, writable: bool, reads: bool = True) -> None:
        self.writable = writable
        self.reads = reads
        self.heads: list[tuple[int, dict[bytes, bytes]]] = []
        self.written: list[bytes] = []
        self.ended = 0
        self.aborted = False
        self.on_left: Callable[[], None] | None = None
        self._body: list[bytes] = [body]

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """See `DirectConnection`."""
        self.on_left = on_left

    def take_body(self) -> bytes | None:
        """See `DirectConnection`."""
        return self._body.pop() if self.writable else None

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """See `DirectConnection`."""
        self.heads.append((status, dict(headers)))
        self.written.append(body)

    async def drain(self) -> bool:
        """See `DirectConnection`."""
        if not self.reads:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return True

    def begin(self, headers: Headers) -> None:
        """See `DirectConnection`."""
        self.heads.append((200, dict(headers)))

    def write(self, data: bytes, *, last: bool = False) -> None:
        """See `DirectConnection`."""
        self.written.append(data)
        self.ended += last

    def abort(self) -> None:
        """See `DirectConnection`."""
        self.aborted = True

    async def receive(self) -> Message:
        """The body, and nothing after it."""
        return {"type": "http.request", "body": self._body.pop()}

    async def send(self, message: Message) -> None:
        """Never used: the two ways of writing do not mix."""
        raise AssertionError(message)

    def scope(self, path: str = "/v1/completions") -> dict[str, object]:
        """A request over this connection."""
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        return {**scope, "extensions": {DIRECT_CONNECTION: self}}


@pytest.mark.parametrize("writable", [True, False])
async def test_events_keep_their_order(make_app: MakeApp, executor: FakeExecutor, *, writable: bool) -> None:
    """All events are written at once if the connection takes them, else one after the other as it does."""
    executor.script = Script(steps=[(20 + n,) for n in range(6)], pause_s=0.01)
    connection = Connection(writable=writable)
    async with asyncio.timeout(5):
        await make_app()(connection.scope(), connection.receive, connection.send)
    assert [status for status, _ in connection.heads] == [200]
    assert connection.heads[0][1][b"content-type"] == b"text/event-stream; charset=utf-8"
    assert connection.ended == 1
    events = [event.removeprefix("data: ") for event in b"".join(connection.written).decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    text = "".join(msgspec.json.decode(event)["choices"][0]["text"] for event in events)
    executor.script = Script(steps=[tuple(20 + n for n in range(6))])
    whole = Connection(writable=False)
    await make_app()(whole.scope(), whole.receive, whole.send)
    assert text == msgspec.json.decode(whole.written[0].split(b"\n\n")[0][6:])["choices"][0]["text"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_stalls_is_cut_off(
    make_app: MakeApp, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """It reads nothing, so that nothing more can be written: not even the error of a request that fails meanwhile."""
    monkeypatch.setattr(endpoint, "STALLED_S", 0.05)
    executor.script = Script(steps=[(40,), (41,)], hold=1)
    connection = Connection(writable=True)

    app = make_app(request_timeout_s=0.5)  # the first token surely comes before
    answering = asyncio.create_task(app(connection.scope(), connection.receive, connection.send))
    await until(lambda: connection.written)
    connection.writable = connection.reads = False
    if fails:
        executor.fail(executor.calls.requests[0].key, TransferError("the cache could not be moved"))
    async with asyncio.timeout(5):
        await answering
    assert connection.aborted
    assert executor.running == 0


async def test_a_client_that_leaves_takes_its_request_along(make_app: MakeApp, executor: FakeExecutor) -> None:
    """The executor is told at once, and nothing is watched any more."""
    executor.script = Script(hold=1)
    connection = Connection(writable=True)
    answering = asyncio.create_task(make_app()(connection.scope(), connection.receive, connection.send))
    await until(lambda: connection.written)
    assert connection.on_left is not None
    connection.on_left()
    async with asyncio.timeout(5):
        await answering
    assert executor.running == 0
    assert executor.calls.aborts == [(executor.calls.requests[0].key.client_id, None)]
    assert connection.on_left is None


async def test_a_failure_before_any_byte_is_a_status_even_if_a_comment_waits(
    make_app: MakeApp, executor: FakeExecutor
) -> None:
    """Pipelined, it begins while its client does not read; the comment that was to start the stream never leaves."""
    executor.script = Script(hold=0)

    class Paused(Connection):
        drained = asyncio.Event()

        async def drain(self) -> bool:
            await self.drained.wait()
            return True

    connection = Paused(writable=True)
    app = make_app(keep_alive_s=0.02)
    answering = asyncio.create_task(app(connection.scope(), connection.receive, connection.send))
    await until(lambda: executor.calls.requests)
    connection.writable = False
    await asyncio.sleep(0.1)
    executor.fail(executor.calls.requests[0].key, TransferError("the cache could not be moved"))
    await asyncio.sleep(0.02)
    connection.drained.set()
    async with asyncio.timeout(5):
        await answering
    assert [status for status, _ in connection.heads] == [503]
