"""A client that costs little: raw HTTP/1.1 on connections that stay open, one request at a time on each.

It counts the server-sent events of an answer and looks at nothing else in it; a status other than 200 is an error.
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

import httptools

EVENT = b"data: "
ANSWER_S = 60.0
"""No answer takes longer."""


def completion(body: bytes, *, api_key: str | None = None) -> bytes:
    """The bytes of `POST /v1/completions` with a JSON body."""
    key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{key}content-type: application/json\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), len(body), body)


class Connection(asyncio.Protocol):
    """One connection; make it with `connect`.

    Attributes:
        events: Events of the answer that is read now, or was last; the end mark is one.
    """

    def __init__(self) -> None:
        self.events = 0
        self._last = b""
        self._refusal = b""
        self._answered: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    async def ask(self, request: bytes) -> int:
        """Send `request` and read the answer; returns the number of its events.

        Raises:
            RuntimeError: The answer's status is not 200, or the connection was lost.
            TimeoutError: No answer within `ANSWER_S`.
        """
        if self._transport is None:
            raise RuntimeError("the connection is not open")
        self.events = 0
        self._last = b""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S):
            await self._answered
        return self.events

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # it is one, for TCP
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._end(RuntimeError(f"the connection was lost: {exc}"))

    def on_body(self, body: bytes) -> None:
        """Part of the body, as the parser gives it."""
        # An event may be cut anywhere: the end of the part before, too short to hold a whole mark, belongs to it.
        self.events += (self._last + body).count(EVENT)
        self._last = body[-len(EVENT) + 1 :]
        if self._parser.get_status_code() != HTTPStatus.OK:
            self._refusal += body

    def on_message_complete(self) -> None:
        """The answer is whole."""
        status = self._parser.get_status_code()
        self._end(None if status == HTTPStatus.OK else RuntimeError(f"status {status}: {self._refusal!r}"))

    def _end(self, error: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)


async def connect(port: int, count: int) -> list[Connection]:
    """Open `count` connections to a port of this host."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


async def ask_in_turn(connections: Sequence[Connection], request: bytes, count: int) -> int:
    """Send `count` requests over each connection, each after the answer to the one before; returns all events."""

    async def ask(connection: Connection) -> int:
        return sum([await connection.ask(request) for _ in range(count)])

    return sum(await asyncio.gather(*map(ask, connections)))
