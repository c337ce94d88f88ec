"""What a connection may cost before its request is here: heads without end, silence, requests that stop half-way."""

import asyncio
import logging

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.waiting import until
from twostroke.frontend import http_protocol, http_server
from twostroke.frontend.exchange import Exchange
from twostroke.frontend.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from twostroke.frontend.http_server import Site, bind, serve


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the whole body, then say how long it was."""
    del scope
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message["body"])
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % length})


async def talk(scope: Scope, receive: Receive, send: Send) -> None:
    """Say what was asked, past ASGI's messages where the server allows it; a body of `stream` gets two events."""
    exchange = Exchange(scope, receive, send)
    body = await exchange.body(1 << 20)
    if body == b"stream":
        await exchange.event(b"data: 1\n\n")
        await exchange.event(b"data: 2\n\n", last=True)
    else:
        await exchange.json(b'"%b"' % body)


def request(body: bytes, version: str = "1.1", extra: bytes = b"") -> bytes:
    """A request that `talk` answers."""
    return b"POST / HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (version.encode(), extra, len(body), body)


LAST = request(b"last", extra=b"connection: close\r\n")
"""The server closes after it."""


async def answer_to(*chunks: bytes, pause_s: float = 0.0, patience_s: float = 1.0, app: ASGIApp = echo) -> bytes:
    """Send `chunks` over one connection, pausing after each; what comes back until it closes, or patience ends."""
    stop, started = asyncio.Event(), asyncio.Event()
    site = Site(app, bind("127.0.0.1", 0))
    task = asyncio.create_task(serve([site], stop=stop, on_started=started.set))
    await started.wait()
    reader, writer = await asyncio.open_connection(*site.socket.getsockname())
    answer = b""
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(patience_s):
            while piece := await reader.read(1 << 16):
                answer += piece
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    stop.set()
    await task
    return answer


async def test_a_head_without_end_is_refused() -> None:
    """431 in the form of every other error, long before the memory is full."""
    lines = [b"x-%d: %s\r\n" % (i, b"a" * 4000) for i in range(1 + MAX_HEAD_BYTES // 4000)]
    answer = await answer_to(b"GET / HTTP/1.1\r\nhost: x\r\n", *lines, pause_s=0.005)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"larger than the limit of 65536 bytes" in answer


async def test_one_header_without_end_is_refused() -> None:
    """The limit counts bytes as they arrive, not headers that are complete."""
    pieces = [b"a" * 4000] * (1 + MAX_HEAD_BYTES // 4000)
    answer = await answer_to(b"GET / HTTP/1.1\r\nhost: x\r\nx: ", *pieces, pause_s=0.005)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_body_is_no_head() -> None:
    """Bodies may be longer than heads, and the next request on the same connection starts to count anew."""
    size = 3 * MAX_HEAD_BYTES
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (size, b"a" * size)
    answer = await answer_to(request, request)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b"%8d" % size) == 2


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was asked, so nothing is answered."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.05)
    started = asyncio.get_running_loop().time()
    assert await answer_to(patience_s=20.0) == b""
    assert asyncio.get_running_loop().time() - started < 15.0  # the server closed it, not the client's patience


@pytest.mark.parametrize("part", [b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"])
async def test_a_request_that_stops_half_way_is_refused(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the head or in the body: 408, and the connection goes."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.5)  # in which the part surely arrives
    answer = await answer_to(part, patience_s=20.0)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the request did not arrive within 0.5 s" in answer


async def test_requests_in_a_row_are_answered_in_order() -> None:
    """Two that come together, the second behind a stream; then one that comes in two parts."""
    whole = request(b"later")
    answer = await answer_to(request(b"stream") + request(b"next"), whole[:-3], whole[-3:], pause_s=0.05, app=talk)
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert rest.startswith(b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert rest.index(b'"next"') < rest.index(b'"later"')
    assert rest.count(b"content-length: ") == 2


async def test_an_old_client_is_told_that_its_connection_closes() -> None:
    """HTTP/1.0 has one answer a connection."""
    answer = await answer_to(request(b"hello", "1.0"), app=talk)
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b'\r\n\r\n"hello"')


async def test_an_old_client_gets_a_stream_as_it_is() -> None:
    """HTTP/1.0 has no chunks: the body ends with the connection."""
    answer = await answer_to(request(b"stream", "1.0"), app=talk)
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("apart", [False, True])
async def test_an_offer_of_another_protocol_is_ignored(*, apart: bool) -> None:
    """Java's client offers HTTP/2 with every request, head and body apart or not; a body may say anything."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAA\r\n"
    first, second = request(b"\r\nUpgrade: me", extra=offer), request(b"later", extra=offer)
    body_at = first.index(b"\r\n\r\n") + 4
    parts = [first[:body_at], first[body_at:]] if apart else [first]
    answer = await answer_to(*parts, second, LAST, pause_s=0.05, patience_s=20.0, app=talk)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.index(b'"\r\nUpgrade: me"') < answer.index(b'"later"')


@pytest.mark.parametrize("name", [b"Upgrade", b"UPGRADE"])
@pytest.mark.parametrize("lead", [b"", b"\r\n"])
async def test_an_offer_is_ignored_wherever_its_bytes_are_parted(name: bytes, lead: bytes) -> None:
    """Also in the second of two requests that come together, in capitals, and behind a stray line break."""
    offering = request(b"hello", extra=b"connection: Upgrade\r\n%b: h2c\r\n" % name)
    at = offering.index(name)
    for cut in (at - 1, at, at + 3, len(offering) - 5, len(offering)):
        both = lead + request(b"one") + offering
        split = len(both) - len(offering) + cut
        parts = [lead + offering[:cut], offering[cut:], both[:split], both[split:], LAST]
        answer = await answer_to(*parts, pause_s=0.03, patience_s=20.0, app=talk)
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(b'"hello"') == 2


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    """`Expect: 100-continue`: the body comes after that."""
    asking = request(b"hello", extra=b"expect: 100-continue\r\n")
    answer = await answer_to(asking[:-5], asking[-5:], pause_s=0.1, app=talk)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'"hello"')


async def test_a_connection_that_rests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the server's next look, which it takes once a second."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0)
    started = asyncio.get_running_loop().time()
    answer = await answer_to(request(b"hello"), patience_s=20.0, app=talk)
    assert answer.endswith(b'"hello"')
    assert asyncio.get_running_loop().time() - started < 15.0  # closed by the server, not by the client's patience


async def test_a_stray_line_break_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old clients send one after a body; it begins no request."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0)
    started = asyncio.get_running_loop().time()
    answer = await answer_to(request(b"hello"), b"\r\n", pause_s=0.05, patience_s=20.0, app=talk)
    assert answer.endswith(b'"hello"')
    assert asyncio.get_running_loop().time() - started < 15.0


@pytest.mark.parametrize("part", [request(b"never whole")[:-3], b"POST / HT"])
async def test_a_late_request_does_not_spoil_the_answer_before_it(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal waits until that answer is whole."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.05)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body(1 << 20)
        await asyncio.sleep(0.3)
        await exchange.json(body)

    answer = await answer_to(request(b"first"), part, pause_s=0.02, app=slow)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.index(b"first") < answer.index(b"HTTP/1.1 408 ")


async def test_a_client_that_leaves_takes_all_its_requests_along(caplog: pytest.LogCaptureFixture) -> None:
    """Also those that it sent behind the first, which nobody begins any more; and nobody complains."""
    begun: list[bytes] = []
    left: list[bytes] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        body = await exchange.body(1 << 20)
        begun.append(body)
        exchange.watch(lambda: left.append(body))
        await until(lambda: left)  # and then says nothing, since nobody is there

    stop, started = asyncio.Event(), asyncio.Event()
    site = Site(slow, bind("127.0.0.1", 0))
    task = asyncio.create_task(serve([site], stop=stop, on_started=started.set))
    await started.wait()
    _, writer = await asyncio.open_connection(*site.socket.getsockname())
    writer.write(request(b"first") + request(b"second") + request(b"third"))
    await until(lambda: begun)
    writer.transport.abort()
    await until(lambda: left)
    stop.set()
    await task
    assert begun == left == [b"first"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_answered_requests_of_a_pipeline_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a client stays ahead of its answers."""
    most = 0

    class Counting(HttpProtocol):
        def on_headers_complete(self) -> None:
            nonlocal most
            super().on_headers_complete()
            most = max(most, len(self._directs))

    monkeypatch.setattr(http_server, "HttpProtocol", Counting)
    stop, started = asyncio.Event(), asyncio.Event()
    site = Site(talk, bind("127.0.0.1", 0))
    task = asyncio.create_task(serve([site], stop=stop, on_started=started.set))
    await started.wait()
    reader, writer = await asyncio.open_connection(*site.socket.getsockname())
    writer.write(request(b"ahead"))
    for _ in range(50):
        writer.write(request(b"next"))
        await reader.readuntil(b'"')
        await reader.readuntil(b'"')
    writer.close()
    stop.set()
    await task
    assert 1 <= most <= 4
