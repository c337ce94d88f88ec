"""The server around the applications: sockets, several ports, and every step of the stop."""

import asyncio
import os
import signal
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from twostroke.frontend import http_server
from twostroke.frontend.http_protocol import HttpProtocol
from twostroke.frontend.http_server import Site, bind, serve
from twostroke.protocol.errors import ConfigError


class App:
    """Answers `/` at once; streams on `/stream` until `release` is set; remembers what it saw."""

    def __init__(self, text: bytes = b"hello") -> None:
        self.text = text
        self.release = asyncio.Event()
        self.streaming = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its body is not looked at."""
        del receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            self.streaming.set()
            await self.release.wait()
        await send({"type": "http.response.body", "body": self.text})


async def start(*apps: App, **options: object) -> tuple[list[str], asyncio.Event, asyncio.Task[None]]:
    """Serve `apps` on free ports; returns their URLs, the stop event and the server's task."""
    stop, started = asyncio.Event(), asyncio.Event()
    sites = [Site(app, bind("127.0.0.1", 0)) for app in apps]
    urls = [site.url for site in sites]
    task = asyncio.create_task(serve(sites, stop=stop, on_started=started.set, **options))  # type: ignore[arg-type] # options of `serve` by name
    await started.wait()
    return urls, stop, task


async def test_two_applications_answer_on_their_own_ports() -> None:
    """One loop serves the public and the admin port."""
    urls, stop, task = await start(App(b"public"), App(b"admin"))
    async with httpx.AsyncClient() as client:
        texts = [(await client.get(url)).text for url in urls]
    stop.set()
    await asyncio.wait_for(task, 5)
    assert texts == ["public", "admin"]


async def test_a_bound_port_refuses_connections_until_served() -> None:
    """A port is known before it answers, so that nobody meets a half-started server."""
    bound = bind("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*bound.getsockname())
    bound.close()


def test_a_taken_port_is_a_configuration_error() -> None:
    """The message names the address and says what to do."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"):
            bind("127.0.0.1", port)


async def test_accepted_connections_have_nagle_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP_NODELAY is set on the server's side of every connection."""
    seen: list[int] = []

    class Spy(HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base
            super().connection_made(transport)
            accepted = transport.get_extra_info("socket")
            seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(http_server, "HttpProtocol", Spy)
    urls, stop, task = await start(App())
    async with httpx.AsyncClient() as client:
        await client.get(urls[0])
    stop.set()
    await task
    assert [bool(value) for value in seen] == [True]


async def test_a_running_request_finishes_within_the_grace() -> None:
    """The stop refuses new connections, and lets what runs come to its end."""
    app = App(b"last")
    urls, stop, task = await start(app, grace_s=5.0, on_stopping=app.release.set)
    async with httpx.AsyncClient() as client, client.stream("GET", urls[0] + "/stream") as response:
        await app.streaming.wait()
        stop.set()
        text = b"".join([chunk async for chunk in response.aiter_bytes()])
    await asyncio.wait_for(task, 5)
    assert text == b"firstlast"
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(urls[0])


async def test_at_the_deadline_the_application_ends_its_streams_itself() -> None:
    """`on_deadline` comes after the grace, and what it makes the streams write still arrives."""
    app = App(b"error event")
    urls, stop, task = await start(app, grace_s=0.1, on_deadline=app.release.set)
    async with httpx.AsyncClient() as client, client.stream("GET", urls[0] + "/stream") as response:
        await app.streaming.wait()
        stop.set()
        text = b"".join([chunk async for chunk in response.aiter_bytes()])
    await asyncio.wait_for(task, 5)
    assert text == b"firsterror event"


async def test_a_request_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step waits for nobody."""
    monkeypatch.setattr(http_server, "FAREWELL_S", 0.1)
    app = App()
    urls, stop, task = await start(app, grace_s=0.1)
    async with httpx.AsyncClient() as client, client.stream("GET", urls[0] + "/stream") as response:
        await app.streaming.wait()
        stop.set()
        with pytest.raises(httpx.TransportError):
            await response.aread()
    await asyncio.wait_for(task, 5)


async def test_a_signal_stops_and_a_second_one_ends_the_grace() -> None:
    """SIGTERM sets the stop; another one skips the rest of a long grace."""
    app = App(b"error event")
    urls, stop, task = await start(app, grace_s=60.0, on_deadline=app.release.set)
    async with httpx.AsyncClient() as client, client.stream("GET", urls[0] + "/stream") as response:
        await app.streaming.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 5)
        os.kill(os.getpid(), signal.SIGINT)
        text = b"".join([chunk async for chunk in response.aiter_bytes()])
    await asyncio.wait_for(task, 5)
    assert text == b"firsterror event"


async def test_bytes_that_are_no_http_get_a_json_error() -> None:
    """Even uvicorn's own refusal has the form of every other error."""
    urls, stop, task = await start(App())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(urls[0].rpartition(":")[2]))
    writer.write(b"\x00\x01 nonsense\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    stop.set()
    await task
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"message":"Invalid HTTP request received."' in answer
