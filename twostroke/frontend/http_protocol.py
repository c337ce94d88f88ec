"""uvicorn's HTTP/1.1 protocol, with bounds on what a connection may cost before its request is here.

    new or idle --first byte--> head --blank line--> body --all of it--> complete --answered--> idle
    head longer than MAX_HEAD_BYTES                      --> 431, closed
    nothing, or only a part of a request, for REQUEST_S  --> 408 (nothing: no answer), closed

uvicorn itself bounds only how long a connection rests between two requests: a head without end would fill the memory,
and a connection that never says anything would be kept for ever. How long a body may be is the application's business.
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from twostroke.frontend.exchange import DIRECT_CONNECTION, Headers
from twostroke.protocol.openai_answers import ErrorBody, ErrorObject

MAX_HEAD_BYTES = 64 << 10
REQUEST_S = 75.0
_LAST_CHUNK = b"0\r\n\r\n"


class _DirectConnection:
    """One response's view of its connection: see `DirectConnection`.

    Args:
        cycle: The response. It stays uvicorn's: what is written here is noted there.

    Attributes:
        writable: See `DirectConnection`; asked for with every token, so `see` notes it.
    """

    __slots__ = ("_chunked", "_cycle", "_on_left", "writable")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._chunked = True
        self._on_left: Callable[[], None] | None = None
        self.see()

    def see(self) -> None:
        """See whether bytes are taken, after anything that may have changed it."""
        cycle = self._cycle
        self.writable = not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    @property
    def complete(self) -> bool:
        """Whether the answer is."""
        return self._cycle.response_complete

    def take_body(self) -> bytes | None:
        """See `DirectConnection`."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body = bytes(cycle.body)
        cycle.body.clear()
        return body

    def watch(self, on_left: Callable[[], None] | None) -> None:
        """See `DirectConnection`."""
        self._on_left = on_left
        if on_left is not None:
            self._cycle.flow.resume_reading()  # a long body may have paused it: then nobody would see the client go
            if self._cycle.disconnected:
                self.left()

    def left(self) -> None:
        """The client has closed the connection; uvicorn itself tells the newest of its responses alone."""
        if not self.complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            self.see()
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()

    async def drain(self) -> bool:
        """See `DirectConnection`."""
        cycle = self._cycle
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        return self.writable

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """See `DirectConnection`."""
        length = (b"content-length", b"%d" % len(body))
        self._cycle.transport.write(self._head(status, [*headers, length]) + body)
        self._complete()

    def begin(self, headers: Headers) -> None:
        """See `DirectConnection`. HTTP/1.0 knows no chunks: there the end of the connection is the end of the body."""
        self._chunked = self._cycle.scope["http_version"] != "1.0"
        encoding = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        self._cycle.transport.write(self._head(HTTPStatus.OK, [*headers, *encoding]))

    def write(self, data: bytes, *, last: bool = False) -> None:
        """See `DirectConnection`."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty one would be the end
            data = data + _LAST_CHUNK if last else data
        self._cycle.transport.write(data)
        if last:
            self._complete()

    def abort(self) -> None:
        """See `DirectConnection`."""
        self._cycle.disconnected = True  # uvicorn would notice in the next turn, and complain of the answer before
        self._cycle.transport.abort()
        self.see()

    def _head(self, status: int, headers: Headers) -> bytes:
        cycle = self._cycle
        cycle.response_started = True
        if not cycle.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        return b"".join([STATUS_LINE[status], *lines, b"\r\n"])

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        self.see()
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class HttpProtocol(HttpToolsProtocol):
    """One connection; arguments as uvicorn's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = 0  # of the head that is being read, but for its first chunk; None in a body
        self._arriving = False  # a request has begun and is not whole
        self._request_timer: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None
        self._directs: list[_DirectConnection] = []  # of requests that have no answer yet: several if pipelined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in the base class
        """Switch Nagle's algorithm off: with it, small chunks wait for the client's delayed acknowledgement (40 ms)."""
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        """Go on with the next request, or rest: see `close_if_idle`."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since_s = self.loop.time()

    def close_if_idle(self, now_s: float) -> None:
        """Close a connection that has rested for long since its last answer. The server asks once a second.

        uvicorn has a timer for each answer instead, made and cancelled hundreds of times a second.
        """
        if self._idle_since_s is not None and now_s - self._idle_since_s >= self.timeout_keep_alive:
            self.timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._see_directs()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._see_directs()

    def _see_directs(self) -> None:
        for direct in self._directs:
            direct.see()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_timer()
        super().connection_lost(exc)
        for direct in self._directs:
            direct.left()

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that does not end."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        self._feed(data)
        if self._arriving:  # most requests arrive at once, and need no timer
            self._await_request()
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request line and headers are larger than the limit of {MAX_HEAD_BYTES} bytes",
            )

    def _feed(self, data: bytes) -> None:
        """Parse. An offer to upgrade is declined: its head is parsed again without it, then what follows.

        There is nothing to upgrade to, and servers may ignore the offer. The parser takes what follows such a head for
        another protocol, which would lose the body of each request of Java's HTTP client: it offers HTTP/2 so.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":  # is an offer by itself
                    self.send_400_response("CONNECT is not supported.")
                    return
                data = self._declined() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def _declined(self) -> bytes:
        parser = self.parser
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self.url, parser.get_http_version().encode())
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([line, *headers, b"\r\n"])

    def on_message_begin(self) -> None:
        """A head begins, perhaps in the middle of a chunk: only what follows that chunk is counted."""
        self._head_bytes = 0
        self._idle_since_s = None
        self._arriving = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is here."""
        if self.parser.should_upgrade():
            return  # comes again: see `_feed`
        self._head_bytes = None
        super().on_headers_complete()
        if self.scope["method"] == "HEAD":  # has an answer without a body, which uvicorn knows about
            return
        direct = _DirectConnection(self.cycle)
        self._directs = [*(one for one in self._directs if not one.complete), direct] if self.pipeline else [direct]
        self.scope["extensions"] = {DIRECT_CONNECTION: direct}  # type: ignore[dict-item] # any value may stand there

    def on_message_complete(self) -> None:
        """The whole request is here."""
        if self.parser.should_upgrade():
            return
        self._arriving = False
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other error, and close."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _await_request(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_S, self._request_late)

    def _stop_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _request_late(self) -> None:
        self._request_timer = None
        cycle = self.cycle
        in_body = self._head_bytes is None  # then the late request is the newest cycle, else one that has none yet
        unanswered = cycle is not None and not cycle.response_complete and (not in_body or cycle.response_started)
        if self.pipeline or unanswered:
            self._await_request()  # a request before it has no whole answer yet, which must not suffer
        elif self.headers is None or (self._head_bytes is None and cycle.response_started):
            self.transport.close()  # it said nothing, or has its answer
        else:
            message = f"the request did not arrive within {REQUEST_S:g} s; send it again, whole"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = msgspec.json.encode(ErrorBody(ErrorObject(message, "invalid_request_error")))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
