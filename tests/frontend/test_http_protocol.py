"""What a connection may cost before its request is here: heads without end, silence, requests that stop half-way."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from twostroke.frontend import http_protocol
from twostroke.frontend.http_protocol import MAX_HEAD_BYTES
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


async def answer_to(*chunks: bytes, pause_s: float = 0.0) -> bytes:
    """Send `chunks` over one connection, pausing after each; what comes back until it closes, or for 1 s."""
    stop, started = asyncio.Event(), asyncio.Event()
    site = Site(echo, bind("127.0.0.1", 0))
    task = asyncio.create_task(serve([site], stop=stop, on_started=started.set))
    await started.wait()
    reader, writer = await asyncio.open_connection(*site.socket.getsockname())
    answer = b""
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(1.0):
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
    assert await answer_to() == b""
    assert asyncio.get_running_loop().time() - started < 1.0  # the server closed it, not the client's patience


@pytest.mark.parametrize("part", [b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"])
async def test_a_request_that_stops_half_way_is_refused(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the head or in the body: 408, and the connection goes."""
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.05)
    answer = await answer_to(part)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the request did not arrive within 0.05 s" in answer
