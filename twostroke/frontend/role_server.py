"""The HTTP process of a context or generation server: probes and metrics, and the owner of one worker world.

    LOADING --world ready--> READY --signal--> STOPPING --world ended--> exit 0
    LOADING --world failed--> FAILED           READY --world died--> FAILED           (the error is raised: exit 2 or 1)

It restarts nothing: whoever started it (`twostroke up`, Kubernetes) starts server and world anew. Requests do not pass
through it; frontends attach to the world's own port.

    /health    200 while the process lives
    /ready     200 once the world takes requests, 503 before, and while it stops
    /metrics   the worker's last heartbeat, for Prometheus
"""

import asyncio
import enum
import socket

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from twostroke.executor.ipc import IpcExecutor
from twostroke.frontend.http_server import Site, bind, run_loop, serve, url_of
from twostroke.frontend.json_errors import error_handlers
from twostroke.frontend.worker_metrics import WorkerCollector, WorkerSample
from twostroke.ipc.secret import load_secret
from twostroke.ipc.supervise import announce_progress, announce_ready
from twostroke.protocol.config import ClusterConfig, SecurityConfig
from twostroke.protocol.errors import ConfigError, TwostrokeError
from twostroke.protocol.worker import Role

PROBE_GRACE_S = 1.0
"""How long probes and scrapes that run may take once the server stops."""

log = structlog.get_logger(__name__)


class ServerState(enum.StrEnum):
    """Where the server is in its life; see the module's docstring."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


_TRANSITIONS = {
    ServerState.LOADING: frozenset({ServerState.READY, ServerState.STOPPING, ServerState.FAILED}),
    ServerState.READY: frozenset({ServerState.STOPPING, ServerState.FAILED}),
    ServerState.STOPPING: frozenset[ServerState](),
    ServerState.FAILED: frozenset[ServerState](),
}


def run_role_server(role: Role, module: str, config: ClusterConfig) -> int:
    """Run a role's server until a signal ends it; returns the exit code 0.

    Args:
        role: `CONTEXT` or `GENERATION`.
        module: Python module of its world, for example `context_server.worker`.
        config: The whole configuration.

    Raises:
        ConfigError: A setting or the model is at fault.
        EngineDeadError: The world failed or died.
    """
    secret = require_secret(config.security, role)
    engine = config.engine(role)
    bound = bind(engine.host, engine.port)
    server = RoleServer(role, module, config, secret)
    run_loop(server.serve(bound))
    return 0


def require_secret(security: SecurityConfig, role: Role) -> bytes:
    """The cluster's secret.

    Raises:
        ConfigError: None is set, or its file is not as it must be.
    """
    if security.secret_file is None:
        raise ConfigError(
            f"security.secret_file: a {role} server needs the secret that all parts of its cluster share; "
            "make one with `openssl rand -hex 32 > FILE` and name the file"
        )
    return load_secret(security.secret_file)


class RoleServer:
    """One server process; see the module.

    Args:
        role: Its role.
        module: Python module of its world.
        config: The whole configuration.
        secret: The cluster's secret.
    """

    def __init__(self, role: Role, module: str, config: ClusterConfig, secret: bytes) -> None:
        self._role = role
        self._module = module
        self._config = config
        self._secret = secret
        self._state = ServerState.LOADING
        self._doing = "starting the world"
        self._executor: IpcExecutor | None = None
        self._address = ""  # of the worker, once it is ready
        self._error: TwostrokeError | None = None
        self._stop = asyncio.Event()
        self._registry = CollectorRegistry()
        self._registry.register(WorkerCollector(self._sample))
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=error_handlers(),
        )

    @property
    def state(self) -> ServerState:
        """Where the server is in its life."""
        return self._state

    async def serve(self, bound: socket.socket) -> None:
        """Serve the port `bound`, start the world, and end both; errors as `run_role_server`."""
        self._executor = executor = IpcExecutor.start(
            self._module,
            self._role,
            self._config.model,
            self._config.engine(self._role),
            secret=self._secret,
            on_progress=self._note_progress,
        )
        watching = asyncio.create_task(self._watch(executor, url_of(bound)))
        try:
            await serve([Site(self.app, bound)], stop=self._stop, grace_s=PROBE_GRACE_S, on_stopping=self._turn_unready)
        finally:
            watching.cancel()
            await asyncio.to_thread(executor.shutdown)
        if self._error is not None:
            raise self._error

    # --- the world ---

    async def _watch(self, executor: IpcExecutor, url: str) -> None:
        """Say when the world is ready, and end the server when it fails or dies."""
        try:
            description = await asyncio.wrap_future(executor.ready)
        except TwostrokeError as error:
            self._fail(error)
            return
        self._address = description.address
        self._move(ServerState.READY)
        log.info("server ready", role=self._role.value, http=url, worker=self._address)
        announce_ready(url, worker=self._address)
        death = await asyncio.wrap_future(executor.died)
        self._fail(death)

    def _note_progress(self, text: str) -> None:
        self._doing = text
        announce_progress(text)

    def _fail(self, error: TwostrokeError) -> None:
        if self._state in (ServerState.LOADING, ServerState.READY):
            self._move(ServerState.FAILED)
            log.error("the world is lost, so this server ends", role=self._role.value, reason=str(error))
            self._error = error
            self._stop.set()

    def _turn_unready(self) -> None:
        if self._state in (ServerState.LOADING, ServerState.READY):
            self._move(ServerState.STOPPING)

    def _move(self, to: ServerState) -> None:
        if to not in _TRANSITIONS[self._state]:
            raise RuntimeError(f"the server cannot go from {self._state} to {to}")
        self._state = to

    # --- HTTP ---

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        if self._state is not ServerState.READY:
            doing = self._doing if self._state is ServerState.LOADING else ""
            return JSONResponse({"status": self._state.value, "detail": doing}, status_code=503)
        return JSONResponse({"status": self._state.value, "worker": self._address})

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def _sample(self) -> WorkerSample | None:
        executor = self._executor
        if executor is None or not self._address:
            return None
        return WorkerSample(self._role, self._address, executor.load, executor.step_age_s)
