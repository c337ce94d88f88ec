"""The client of the benchmarks counts what a server sent, however it was cut."""

import asyncio

import pytest

from benchmarks.http_load import ask_in_turn, completion, connect

EVENTS = b"data: {}\n\ndata: {}\n\ndata: [DONE]\n\n"


def _chunked(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def _ask(answer: bytes, cut: int) -> int:
    """Ask a server twice that sends `answer` in two parts."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(answer[:cut])
            await asyncio.sleep(0.01)
            writer.write(answer[cut:])
        await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connections = await connect(server.sockets[0].getsockname()[1], 1)
        try:
            return await ask_in_turn(connections, completion(b"{}", api_key="k"), 2)
        finally:
            connections[0].close()


@pytest.mark.parametrize("cut", [1, 40, 55, 58, 60, 70, 100])
async def test_events_are_counted_once(cut: int) -> None:
    """An event that comes in two parts is one; both answers on one connection count."""
    assert await _ask(_chunked(EVENTS), cut) == 6


async def test_a_refusal_is_an_error() -> None:
    """Nobody measures how fast errors are."""
    with pytest.raises(RuntimeError, match="status 500"):
        await _ask(b"HTTP/1.1 500 no\r\ncontent-length: 2\r\n\r\nno", 5)
