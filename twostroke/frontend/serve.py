"""`twostroke serve`: one process with the OpenAI endpoints over a worker world that runs both phases.

read tokenizer and keys -> bind the port -> start the world and serve at once (unready: 503)
  -> the world is ready: announce it
  -> SIGTERM or SIGINT: refuse new requests, let running ones finish for a while, fail the rest, end the world
  -> the world fails to start or dies: the same, and the process ends with its error
"""

import asyncio
import socket

import structlog
from prometheus_client import CollectorRegistry

from twostroke.executor.ipc import IpcExecutor
from twostroke.frontend.app import FrontendOptions, create_app, in_flight_of
from twostroke.frontend.http_server import Site, bind, run_loop, serve
from twostroke.frontend.tokenizer import TextModel
from twostroke.frontend.worker_metrics import WorkerCollector, WorkerSample
from twostroke.ipc.secret import load_secret
from twostroke.ipc.supervise import announce_progress, announce_ready
from twostroke.protocol.config import ClusterConfig
from twostroke.protocol.worker import Role

WORKER_MODULE = "twostroke.worker"

log = structlog.get_logger(__name__)


def run(config: ClusterConfig) -> int:
    """Serve until a signal asks to stop; returns the process's exit status.

    Raises:
        ConfigError: A setting is wrong, or the port is taken.
        ModelError: The model cannot be served.
        EngineDeadError: The worker world died.
    """
    text = TextModel.load(config.model.path, config.model.generation_config)
    options = FrontendOptions.configured(config)
    with bind(config.aggregated.host, config.aggregated.port) as public:
        run_loop(_serve(config, text, options, public))
    return 0


async def _serve(config: ClusterConfig, text: TextModel, options: FrontendOptions, public: socket.socket) -> None:
    executor = _start_world(config)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: _sample(executor)))
    app = create_app(executor, text, options, registry)
    in_flight = in_flight_of(app)
    site = Site(app, public)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    executor.died.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.set))
    announcing = loop.create_task(_announce(executor, site.url))
    try:
        await serve([site], stop=stop, on_stopping=in_flight.stop_admitting, on_deadline=in_flight.fail_pending)
        failure = executor.died.result() if executor.died.done() else None
    finally:
        announcing.cancel()
        # It waits for the world, which may take a while; the loop has nothing else to do, but signals have handlers.
        await asyncio.to_thread(executor.shutdown)
    if failure is not None:
        # A start that failed has a more exact error than the death that followed from it.
        raise (executor.ready.exception() if executor.ready.done() else None) or failure


def _start_world(config: ClusterConfig) -> IpcExecutor:
    secret_file = config.security.secret_file
    return IpcExecutor.start(
        WORKER_MODULE,
        Role.AGGREGATED,
        config.model,
        config.aggregated,
        secret=None if secret_file is None else load_secret(secret_file),
        on_progress=announce_progress,
    )


async def _announce(executor: IpcExecutor, url: str) -> None:
    """Say where the server listens, and when it can serve. A failed start is reported by `_serve`."""
    log.info("server listening", url=url)
    known = asyncio.Event()
    loop = asyncio.get_running_loop()
    executor.ready.add_done_callback(lambda _: loop.call_soon_threadsafe(known.set))
    await known.wait()
    if executor.ready.exception() is None:
        description = executor.description
        log.info("server ready", url=url, model=description.model, worker=description.address)
        announce_ready(url, worker=description.address)


def _sample(executor: IpcExecutor) -> WorkerSample | None:
    if not executor.ready.done() or executor.ready.exception() is not None:
        return None
    name = executor.description.address or "local"
    return WorkerSample(Role.AGGREGATED, name, executor.load, executor.step_age_s)
