"""One HTTP/1.1 connection that streams an answer's body to its reader; a few microseconds a chunk.

httpx costs hundreds, which a load generator beside the server under test would take from it.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        base: Path before `/v1`, without a slash at its end.
    """

    host: str
    port: int
    secure: bool
    base: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Read `http://host:port`, with or without `/v1`.

        Raises:
            ConfigError: It is no such URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url: {url}: {error}") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"--url: expected http://host:port, not {url}")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, base)

    def request(self, method: str, path: str, body: bytes = b"", api_key: str | None = None) -> bytes:
        """A whole request for `/v1<path>`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}/v1{path} HTTP/1.1", f"host: {host}:{self.port}", f"content-length: {len(body)}"]
        lines += ["content-type: application/json", "accept: text/event-stream, application/json"]
        if api_key is not None:
            lines.append(f"authorization: Bearer {api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time.

    Attributes:
        usable: It may carry another request.
        touched: Something of the running answer has arrived.
    """

    def __init__(self) -> None:
        self.usable = True
        self.touched = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._on_body: Callable[[bytes], None] = _ignore

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        """Connect.

        Raises:
            OSError: Nobody answers.
        """
        context = ssl.create_default_context() if target.secure else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, target.host, target.port, ssl=context)
        return connection

    async def exchange(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a request, give the answer's body to `on_body` as it comes; its status once it is whole.

        Raises:
            ConnectionError: The connection was lost first, or the answer is no HTTP.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self._on_body, self.touched = on_body, False
        if self._transport is None or not self.usable:
            raise ConnectionResetError("the connection is closed")
        self._transport.write(request)
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; safe to call twice."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(ConnectionError(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost(ConnectionResetError(f"the connection was lost: {exc}" if exc else "the server closed it"))

    def on_body(self, body: bytes) -> None:
        """Parser callback."""
        self._on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback."""
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())

    def _lost(self, error: ConnectionError) -> None:
        self.usable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _ignore(_body: bytes) -> None:
    """No request runs."""
