"""The router's process: public and admin port, and the links to all workers, on one event loop.

read secret and tokenizer -> bind both ports -> attach to workers
  -> serve at once (unready: 503) -> announce readiness once every needed role has a live worker
  -> SIGTERM or SIGINT: refuse new requests, let running ones finish for a while, fail the rest, leave the workers
"""

import asyncio
import functools
import socket

import structlog
from prometheus_client import CollectorRegistry

from router.admin import create_admin_app
from router.executor import RouterExecutor
from twostroke.executor.remote import RemoteExecutor, RemoteOptions
from twostroke.frontend.app import FrontendOptions, create_app, in_flight_of
from twostroke.frontend.http_server import Site, bind, run_loop, serve
from twostroke.frontend.tokenizer import TextModel
from twostroke.ipc.secret import load_secret
from twostroke.ipc.supervise import announce_progress, announce_ready
from twostroke.protocol.config import ClusterConfig, RouterConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.ids import ClientIds, draw_frontend_id

MAX_PORT = 65535

_log = structlog.get_logger(__name__)


def run(config: ClusterConfig) -> int:
    """Run the router until a signal asks it to stop; returns the process's exit status.

    Raises:
        ConfigError: A setting is wrong, a port is taken, or the secret cannot be read.
        ModelError: The model's folder has no usable tokenizer.
        EngineDeadError: The router broke by a bug of its own.
    """
    if config.security.secret_file is None:
        raise ConfigError("security.secret_file: the router attaches to its workers with the cluster's secret; set it")
    secret = load_secret(config.security.secret_file)
    text = TextModel.load(config.model.path, config.model.generation_config)
    with bind(config.router.host, config.router.port) as public, _bind_admin(config.router) as admin:
        run_loop(_serve(config, secret, text, public, admin))
    return 0


async def _serve(
    config: ClusterConfig,
    secret: bytes,
    text: TextModel,
    public: socket.socket,
    admin: socket.socket,
) -> None:
    registry = CollectorRegistry()
    client_ids = ClientIds(draw_frontend_id())
    attach = functools.partial(
        RemoteExecutor.attach,
        secret=secret,
        client_ids=client_ids,
        options=RemoteOptions(dead_after_s=config.router.dead_after_s),
    )
    stop = asyncio.Event()
    executor = RouterExecutor(config, client_ids, attach, registry, on_dead=stop.set)
    app = create_app(executor, text, FrontendOptions.configured(config), registry)
    in_flight = in_flight_of(app)
    sites = Site(app, public), Site(create_admin_app(executor), admin)
    executor.start()
    announcing = asyncio.create_task(_announce(executor, *sites))
    try:
        await serve(
            sites,
            stop=stop,
            on_stopping=in_flight.stop_admitting,
            on_deadline=in_flight.fail_pending,
        )
    finally:
        announcing.cancel()
        await executor.aclose()
    if executor.failure is not None:
        raise executor.failure


async def _announce(executor: RouterExecutor, public: Site, admin: Site) -> None:
    """Say where the router listens, and when it can serve."""
    _log.info("router listening", url=public.url, admin=admin.url)
    announce_progress("waiting for workers")
    await executor.ready()
    _log.info("router ready", url=public.url, model=executor.model.name)
    announce_ready(public.url, admin=admin.url)


def _bind_admin(config: RouterConfig) -> socket.socket:
    """The admin port: as configured, or public + 1; a free one beside a free public port."""
    port = config.admin_port
    if port is None:
        port = config.port + 1 if config.port else 0
    if port > MAX_PORT:
        raise ConfigError(f"router.admin_port: public + 1 is {port}, which is no port; set one")
    return bind(config.admin_host, port)
