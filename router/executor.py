"""`RouterExecutor`: the executor boundary over all workers of a cluster.

    submit_to --> room? --> register the life of the request --> place it (or let it wait) --> its legs feed the sink

Everything lives on one event loop: the verbs are called there, the links of the workers deliver there. The blocking
iteration of a result on that loop's own thread would wait for itself; read results with `async for`.
"""

import asyncio
import random
from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry

from router.dispatch import Dispatcher
from router.ledger import Ledger
from router.metrics import LedgerCollector, RouterMetrics, WorkersCollector
from router.pool import Attach, WorkerPool
from router.request_life import LifeContext, RequestLife
from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.protocol.config import ClusterConfig
from twostroke.protocol.errors import EngineDeadError, OverloadedError
from twostroke.protocol.ids import ClientIds
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.tokens import token_count
from twostroke.protocol.worker import Role

_log = structlog.get_logger(__name__)


class RouterExecutor(GenerationExecutor):
    """Sends each request through its phases on the workers of the cluster. Made and used on one running event loop.

    Args:
        config: `router` and `workers` are read.
        client_ids: Draws the ids of this router's requests; the links attach with the same frontend id.
        attach: Makes a link to a worker.
        registry: Where the router's metrics are registered.
        on_dead: Called once if the router breaks by a bug of its own; `failure` says how.
        draw: Randomness of back-offs.

    Attributes:
        failure: How the router broke; None while it has not.

    Raises:
        ConfigError: The configured workers cannot serve.
    """

    def __init__(
        self,
        config: ClusterConfig,
        client_ids: ClientIds,
        attach: Attach,
        registry: CollectorRegistry,
        *,
        on_dead: Callable[[], None] = lambda: None,
        draw: random.Random | None = None,
    ) -> None:
        router = config.router
        loop = asyncio.get_running_loop()
        self.ledger = Ledger()
        self.failure: EngineDeadError | None = None
        self._on_dead = on_dead
        self.pool = WorkerPool(
            config.workers,
            attach,
            router.suspect_after_s,
            on_change=self._workers_changed,
            on_broken=self._broke,
            draw=draw,
        )
        self._dispatcher = Dispatcher(self.pool, router)
        self._metrics = RouterMetrics(registry)
        registry.register(LedgerCollector(self.ledger))
        registry.register(WorkersCollector(self.pool.slots))
        self._client_ids = client_ids
        self._lives: dict[int, RequestLife] = {}
        self._was_ready = asyncio.Event()
        self._stopped = False
        self._health = _no_worker(self.pool.roles[0])
        self._context = LifeContext(
            ledger=self.ledger,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            loop=loop,
            max_attempts=router.max_attempts,
            request_timeout_s=router.request_timeout_s,
            on_end=self._ended,
        )

    def start(self) -> None:
        """Begin to attach to the workers."""
        self.pool.start()

    async def ready(self) -> None:
        """Wait until every needed role has had a live worker at the same time."""
        await self._was_ready.wait()

    @property
    def model(self) -> ServedModel:
        """The model that the workers serve; errors as `GenerationExecutor.model`."""
        return self.pool.model

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._dispatcher.waiting

    def draw_client_id(self) -> int:
        """A client id for a new request."""
        return self._client_ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """Run `request` on the cluster; see `GenerationExecutor`.

        Raises:
            EngineDeadError: The router was shut down.
            OverloadedError: No worker can take it, and it cannot wait.
            ValueError: The client id is under way already, or the request is one for a worker.
        """
        if self._stopped:
            raise EngineDeadError("the router is shut down and takes no requests")
        if request.phase is not Phase.FULL:
            raise ValueError(f"phase must be full, not {request.phase}: the router chooses the phases itself")
        if request.key.client_id in self._lives:
            raise ValueError(f"client id {request.key.client_id:016x} is under way already")
        try:
            placement = self._dispatcher.admit(token_count(request.prompt_ids))
        except OverloadedError:
            self._metrics.refused += 1
            raise
        life = RequestLife(self._context, request, sinks)
        self._lives[request.key.client_id] = life
        life.start(placement)

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """End a request, or one index of it, at every worker that it is on; see `GenerationExecutor`."""
        life = self._lives.get(client_id)
        if life is not None:
            life.cancel(index)

    def complete_request(self, client_id: int, index: int | None = None) -> None:
        """End a request, or one index of it, whose client has all of it; see `GenerationExecutor`."""
        life = self._lives.get(client_id)
        if life is not None:
            life.complete(index)

    def check_health(self) -> Health:
        """READY while every needed role has an attached worker. It outlives its workers: only `shutdown` kills it.

        Every request asks for it: it is as of the pool's last tick.
        """
        if self._stopped:
            return Health(HealthState.DEAD, str(self.failure or "the router is shut down"))
        return self._health

    def shutdown(self, deadline_s: float | None = None) -> None:
        """Fail what is pending and close the links; the workers go on, they belong to others."""
        if self._stopped:
            return
        self._stopped = True
        for life in list(self._lives.values()):
            life.give_up(EngineDeadError("the router is shutting down"))
        self.pool.close_links(deadline_s)

    async def aclose(self) -> None:
        """`shutdown`, and end the tasks of the pool."""
        self.shutdown()
        await self.pool.close()

    def _workers_changed(self) -> None:
        """At each tick of the pool, and whenever a worker came or went."""
        missing = self.pool.missing_role()
        if missing is None:
            self._health = Health(HealthState.READY)
            self._was_ready.set()
        else:
            self._health = _no_worker(missing)
        self._dispatcher.pump()
        now = self._context.loop.time()
        for life in [life for life in self._lives.values() if life.ends_at_s <= now]:
            try:
                life.time_is_up()
            except Exception:  # noqa: BLE001 - the others, and the pool whose tick this is, go on
                _log.exception("a request broke at its deadline", client_id=f"{life.request.key.client_id:016x}")

    def _broke(self, error: BaseException) -> None:
        """A part that everything hangs on is gone: end, so that whoever started the router starts it anew."""
        if self.failure is None:
            self.failure = EngineDeadError(f"the router broke: {error!r}; its log has the traceback")
            self.shutdown()
            self._on_dead()

    def _ended(self, life: RequestLife) -> None:
        self._lives.pop(life.request.key.client_id, None)


def _no_worker(role: Role) -> Health:
    reason = f"no live {role} worker; try again later (the admin port says why at /workers)"
    return Health(HealthState.STARTING, reason)
