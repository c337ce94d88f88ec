"""Serves ASGI applications on sockets that are bound already: one event loop, any number of ports.

The life of a server:

    bind(host, port)            the port is ours and known, but nobody is answered yet
    serve(...)                  listen -> `on_started` -> wait for `stop`, SIGTERM or SIGINT
      1. stop accepting         new connections are refused from here on
      2. `on_stopping`          the application turns unready and refuses new requests on open connections
      3. finish                 idle connections close; running requests have `grace_s` (a second signal ends it)
      4. `on_deadline`          the application fails what still runs: each stream gets its error event
      5. farewell               `FAREWELL_S` to write those last bytes
      6. cut                    what is left is cancelled and its connections are dropped

uvicorn's HTTP protocol does the parsing; its server is replaced, because several ports share one stop here and streams
end with an event instead of a cut. Applications are served without ASGI's lifespan: whoever calls `serve` owns what
they use.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import TypeVar

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from twostroke.frontend.http_protocol import HttpProtocol
from twostroke.protocol.errors import ConfigError

log = structlog.get_logger(__name__)
T = TypeVar("T")

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""An idle connection stays open so long: longer than usual clients keep one, so that they close first."""
FAREWELL_S = 1.0
GC_OBJECTS = 50_000
"""Objects that are made, and not freed, between two collections of the young."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Site:
    """One application on one bound socket."""

    app: ASGIApp
    socket: socket.socket

    @property
    def url(self) -> str:
        """`http://host:port` under which this host reaches the site."""
        return url_of(self.socket)


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host:port` (0: a free port), not listening yet: connections are refused until `serve`.

    Raises:
        ConfigError: The address is unknown, or another process has the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """`http://host:port` of a bound socket; a wildcard address is shown as loopback."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not bound to
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_loop(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end on a uvloop event loop of its own, with as many open files as the system allows.

    Each connection is one: shells often start programs with a soft limit of 1024, below `frontend.max_in_flight`.
    """
    # What start-up made stays to the end: the collector need not walk it again and again. What requests make is freed
    # as they go, but for a few cycles; at the default of 700 objects collections took a tenth of a busy router's time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return uvloop.run(main)


async def serve(
    sites: Sequence[Site],
    *,
    stop: asyncio.Event,
    grace_s: float = 3.0,
    on_started: Callable[[], None] = lambda: None,
    on_stopping: Callable[[], None] = lambda: None,
    on_deadline: Callable[[], None] = lambda: None,
) -> None:
    """Serve `sites` until `stop` is set or a signal asks for the end; see the module's docstring.

    Args:
        sites: Applications and their sockets; the sockets are closed at the end.
        stop: Ends the service when set (the caller's own reasons, for example a dead worker).
        grace_s: Running requests may take so long to finish after the stop.
        on_started: Called once all sites accept connections.
        on_stopping: Called when the stop begins.
        on_deadline: Called when the grace is over and requests still run.
    """
    state = ServerState()
    listeners = [await _listen(site, state) for site in sites]
    hurry = asyncio.Event()
    with _signals(stop, hurry):
        on_started()
        await _until_stopped(stop, state)
        log.info("http server stopping", running=len(state.tasks), grace_s=grace_s)
        # 1. Closed listeners refuse new connections, so that load balancers and clients turn elsewhere at once.
        for listener in listeners:
            listener.close()
        # 2. Connections that are open already may still send requests: the application refuses those itself.
        on_stopping()
        # 3. uvicorn closes idle connections here and the others after their response.
        for connection in list(state.connections):
            connection.shutdown()
        finished = await _drained(state, grace_s, hurry)
        # 4. Whoever still waits gets a final event rather than a cut connection.
        if not finished:
            on_deadline()
            # 5. The events have to leave; a client that does not read them is not waited for.
            finished = await _drained(state, FAREWELL_S, None)
        # 6. Nothing below waits for a client.
        if not finished:
            await _cut(state)
    log.info("http server stopped")


async def _listen(site: Site, state: ServerState) -> asyncio.Server:
    config = uvicorn.Config(
        site.app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    loop = asyncio.get_running_loop()
    return await loop.create_server(
        lambda: HttpProtocol(config=config, server_state=state, app_state={}, _loop=loop),
        sock=site.socket,
        backlog=BACKLOG,
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets `stop`, the second `hurry`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in signals:
            loop.add_signal_handler(number, on_signal)
    except (RuntimeError, ValueError):
        signals = ()  # not the main thread (tests): there only `stop` ends the service
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _until_stopped(stop: asyncio.Event, state: ServerState) -> None:
    """Wait for `stop`; meanwhile, once a second, renew the Date header and close connections that rest for long."""
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        for connection in list(state.connections):
            if isinstance(connection, HttpProtocol):
                connection.close_if_idle(loop.time())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)


async def _drained(state: ServerState, within_s: float, hurry: asyncio.Event | None) -> bool:
    """Wait until no request runs and no connection is open, for `within_s` seconds at most or until `hurry`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while state.tasks or state.connections:
        if asyncio.get_running_loop().time() >= deadline or (hurry is not None and hurry.is_set()):
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _cut(state: ServerState) -> None:
    log.warning("http server cuts what is left", requests=len(state.tasks), connections=len(state.connections))
    for connection in list(state.connections):
        connection.transport.abort()
    tasks = list(state.tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=FAREWELL_S)
