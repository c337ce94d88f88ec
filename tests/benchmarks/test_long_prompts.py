"""The load of running streams and long prompts: what is sent, what counts, and what is made of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from benchmarks.long_prompts import Observed, OfferedLoad, gaps_within, lone_ttft_s, observe

PIECE = b'data: {"choices":[{"text":"a"}]}\n\n'
END = b"data: [DONE]\n\n"
LOAD = OfferedLoad(streams=3, stream_prompt=4, prompt=50, output=2, every_s=0.05, arrivals=4)


@dataclass
class Endpoint:
    """Streams a piece every few milliseconds; refuses prompts of `refused` tokens.

    Attributes:
        lengths: Of the prompts that came, in order.
        cut: Has an item for each stream that the client gave up.
    """

    refused: int = 0
    url: str = ""
    lengths: list[int] = field(default_factory=list)
    cut: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                if head.startswith("get /v1/models "):
                    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{"data":[{"id":"m"}]}')
                else:
                    await self._answer(writer, json.loads(body))
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, asked: dict[str, object]) -> None:
        prompt, count = asked["prompt"], asked["max_tokens"]
        assert isinstance(prompt, list)
        assert isinstance(count, int)
        self.lengths.append(len(prompt))
        if len(prompt) == self.refused:
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(count):
                writer.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
                await writer.drain()
                await asyncio.sleep(0.003)
        except ConnectionError:
            self.cut.put_nowait(None)
            raise
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(END), END))


@asynccontextmanager
async def _endpoint(refused: int = 0) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(refused)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield endpoint
    finally:
        server.close()


async def test_all_is_sent_and_watched() -> None:
    """All streams first, then every long prompt; the streams are given up at the end, not waited for."""
    async with _endpoint() as endpoint:
        seen = await observe([endpoint.url], LOAD, seed=1)
        assert endpoint.lengths == [4] * 3 + [50] * 4
        assert len(seen.ttft_s) == 4
        assert min(seen.ttft_s) > 0
        assert seen.gaps_s == sorted(seen.gaps_s)
        assert len(seen.gaps_s) >= 3
        assert seen.window_s == pytest.approx(0.2)
        async with asyncio.timeout(10):
            for _ in range(LOAD.streams):
                await endpoint.cut.get()


async def test_two_servers_share_the_load() -> None:
    """Streams and long prompts are dealt out in turn."""
    async with _endpoint() as one, _endpoint() as other:
        await observe([one.url, other.url], LOAD, seed=1)
        assert one.lengths == [4, 4, 50, 50]
        assert other.lengths == [4, 50, 50]


async def test_refused_long_prompts_are_an_error() -> None:
    """A contender that refuses work must not look fast."""
    async with _endpoint(refused=50) as endpoint:
        with pytest.raises(RuntimeError, match="4 of 4 long prompts failed: http 503"):
            await observe([endpoint.url], LOAD, seed=1)
        with pytest.raises(RuntimeError, match="a prompt of 50 tokens failed: http 503"):
            await lone_ttft_s(endpoint.url, 50, seed=1)


async def test_a_refused_stream_is_an_error() -> None:
    """Likewise for the streams."""
    async with _endpoint(refused=4) as endpoint:
        with pytest.raises(RuntimeError, match="a stream broke off"):
            await observe([endpoint.url], LOAD, seed=1)


def test_gaps_count_where_they_begin() -> None:
    """A stall that begins in the window counts whole, though it ends later."""
    assert gaps_within([1.0, 2.0, 4.0, 9.0, 10.0], begun=2.0, ended=9.0) == [2.0, 5.0]


@pytest.mark.parametrize(
    ("waits", "growth", "keeps_up"),
    [([3.0, 3.0, 3.0], 0.0, True), ([3.0, 4.0, 5.0], 0.5, False), ([3.0, 2.0, 2.5], -0.125, True), ([3.0], 0.0, True)],
)
def test_a_growing_backlog_is_noticed(waits: list[float], growth: float, *, keeps_up: bool) -> None:
    """Each long prompt waits longer than the one before, by a share of the pace."""
    seen = Observed([0.1, 0.2], waits, window_s=6.0, every_s=2.0)
    assert seen.growth == pytest.approx(growth)
    assert seen.keeps_up is keeps_up
