"""One HTTP request and its answer, with the rule that a failure has one form before the first byte and one after.

open --json()/fail()--> complete                           (a status code and a JSON body)
open --event(...)--> streaming --event(...)--> streaming   (status 200, server-sent events; comments in silence)
streaming --event(last=True)/fail()--> complete            (fail: one `data: {"error": ...}` event, then the end)
any --the client closes--> left                            (nothing is sent any more)
"""

import asyncio
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from starlette.types import Receive, Scope, Send

from twostroke.frontend.errors import CLIENT_LEFT, ApiError, ClientLeftError, Kind, problem_of

log = structlog.get_logger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in an event stream: clients skip it."""

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values."""

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back otherwise
]


DIRECT_CONNECTION = "twostroke.direct_connection"
"""The ASGI extension that servers with a `DirectConnection` offer; without it messages do what it does."""


class DirectConnection(Protocol):
    """The client's connection without the messages of ASGI in between."""

    def take_body(self) -> bytes | None:
        """The request's whole body, if it is here already."""
        ...

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """Have `on_left` called once the client has closed it, now if it has already; None ends that."""
        ...

    @property
    def writable(self) -> bool:
        """Whether bytes are taken at once: the client is there, and reads fast enough."""
        ...

    async def drain(self) -> bool:
        """Wait until bytes are taken; False if the client has left."""
        ...

    def answer(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole response."""
        ...

    def begin(self, headers: "Headers") -> None:
        """Begin a response of unknown length, with status 200."""
        ...

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body of a response that has begun."""
        ...

    def abort(self) -> None:
        """Close the connection at once; what was not read is lost."""
        ...


class State(enum.Enum):
    """How far the answer has come."""

    OPEN = "open"
    STREAMING = "streaming"
    COMPLETE = "complete"
    LEFT = "left"


_STREAMING = State.STREAMING  # looking up an enum's member takes as long as all else that is asked for each token


class Exchange:
    """Reads one request and writes one answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._writes = self._writes_seen = 0
        self._writing = False
        self._period_s: float | None = None
        self._silent_since_s: float | None = None
        self._comment: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        # Taken from the scope, of which it knows: a cycle would keep every request until the garbage is collected.
        self._direct: DirectConnection | None = scope.get("extensions", {}).pop(DIRECT_CONNECTION, None)
        self.state = State.OPEN

    async def body(self, limit: int) -> bytes:
        """The request's whole body.

        Raises:
            ApiError: It is longer than `limit` bytes (413).
            ClientLeftError: The client left before it was sent.
        """
        whole = None if self._direct is None else self._direct.take_body()
        if whole is not None:
            _refuse_above(limit, len(whole))
            return whole
        announced = next((value for name, value in self._scope["headers"] if name == b"content-length"), b"")
        _refuse_above(limit, int(announced) if announced.isdigit() else 0)
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.state = State.LEFT
                raise ClientLeftError("the client left while it sent its request")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            _refuse_above(limit, size)
            more = message.get("more_body", False)
        return b"".join(chunks)

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` as soon as the client closes its connection, until `unwatch`. The body was read before."""
        if self._direct is not None:
            self._direct.watch(functools.partial(self._left, on_left))
            return

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._left(on_left)

        self._watcher = asyncio.get_running_loop().create_task(wait())

    def unwatch(self) -> None:
        """Watch the connection no longer."""
        if self._direct is not None:
            self._direct.watch(None)
        if self._watcher is not None:
            self._watcher.cancel()

    def _left(self, tell: Callable[[], None]) -> None:
        if self.state in (State.OPEN, State.STREAMING):
            self.state = State.LEFT
            tell()

    async def json(self, body: bytes, status: int = 200, headers: Headers = ()) -> None:
        """Answer with a JSON body and be complete."""
        if self._direct is None:
            await self._send_json(body, status, headers)
        elif self._direct.writable or await self._direct.drain():
            self._direct.answer(status, [*_JSON, *headers], body)
        if self.state is State.OPEN:
            self.state = State.COMPLETE

    async def _send_json(self, body: bytes, status: int, headers: Headers) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [*_JSON, length, *headers]})
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, data: bytes, *, last: bool = False) -> None:
        """Write encoded events; the first ones start the stream with status 200, the last ones complete it.

        Waits while the client reads slower than tokens come.
        """
        if self._comment is not None:  # written by another task, and perhaps still being so
            await asyncio.wait((self._comment,))
            self._comment = None
        await self._write(data, last=last)

    @property
    def writable(self) -> bool:
        """Whether `write_event` may be called: the stream has begun, and the server takes bytes at once."""
        direct = self._direct
        if direct is None or self._writing or self._comment is not None or self.state is not _STREAMING:
            return False
        return direct.writable

    def write_event(self, data: bytes) -> None:
        """Write encoded events in the middle of a stream, without waiting. Only while it is `writable`."""
        if data and self._direct is not None:
            self._writes += 1
            self._direct.write(data)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._writes += 1
        begins = self.state is State.OPEN
        self._writing = True
        try:
            if self._direct is None:
                if begins:
                    self.state = State.STREAMING  # before the write: from here on no status can be sent any more
                await self._send_events(data, begins=begins, last=last)
            elif self._direct.writable or await self._direct.drain():
                if begins:
                    self.state = State.STREAMING  # after the wait, which may be cancelled: then there is no head yet
                    self._direct.begin(_EVENTS)
                self._direct.write(data, last=last)
        finally:
            self._writing = False
        if last and self.state is State.STREAMING:
            self.state = State.COMPLETE

    async def _send_events(self, data: bytes, *, begins: bool, last: bool) -> None:
        if begins:
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def keep_alive(self, period_s: float | None) -> None:
        """Let `tick` write a comment whenever the stream was silent for `period_s`: proxies cut silent ones.

        The first comment starts the stream, so that a failure after it is an event and no status any more.

        Args:
            period_s: Seconds; None for no comments from now on.
        """
        self._period_s = period_s
        self._silent_since_s = None
        if period_s is None and self._comment is not None:
            self._comment.cancel()

    def tick(self, now_s: float) -> None:
        """See how long nothing was written."""
        if self._period_s is None:
            return
        if self._silent_since_s is None or self._writes != self._writes_seen or self._writing:
            self._silent_since_s = now_s
            self._writes_seen = self._writes
        elif now_s - self._silent_since_s >= self._period_s and self.state in (State.OPEN, State.STREAMING):
            self._silent_since_s = now_s
            self._comment = asyncio.get_running_loop().create_task(self._write(KEEP_ALIVE))

    async def fail(self, error: BaseException) -> int:
        """End with `error`, in the form that the state asks for.

        Returns:
            The status that this failure is, whether it could still be sent as one or not.
        """
        if self.state is State.LEFT:
            return CLIENT_LEFT
        problem = problem_of(error)
        if problem.unexpected:
            log.error("unexpected error while answering", path=self._scope["path"], exc_info=error)
        if self.state is State.OPEN:
            await self.json(problem.body, problem.status, problem.headers)
        elif self.state is State.STREAMING:
            await self.event(b"data: " + problem.body + b"\n\n", last=True)
        return problem.status

    async def give_up(self, error: BaseException) -> int:
        """End with `error` without waiting for a client that does not read: its connection is cut off.

        Returns:
            The status that this failure is.
        """
        if self.state is State.OPEN and (self._direct is None or self._direct.writable):
            return await self.fail(error)
        self.state = State.LEFT
        if self._direct is not None:
            self._direct.abort()
        return CLIENT_LEFT


def _refuse_above(limit: int, size: int) -> None:
    if size > limit:
        message = f"the body of {size} bytes or more is larger than the limit of {limit} bytes"
        raise ApiError(Kind.TOO_LARGE, message, code="request_too_large")
