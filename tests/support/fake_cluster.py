"""A router over fake workers, on the test's own event loop."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry

from router.executor import RouterExecutor
from router.workers import WorkerLink, WorkerState
from tests.support.fake_remote import FakeWorker, RecordingSink, describe
from twostroke.protocol.config import ClusterConfig, RouterConfig, WorkersConfig
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role

WAIT_S = 5.0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds.

    Raises:
        TimeoutError: It does not, in 5 s.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


@dataclass(eq=False)
class FakeCluster:
    """Workers by address, and the router over them.

    Attributes:
        workers: Who answers at each address; none there refuses the connection.
        executor: The router.
        registry: Its metrics.
    """

    workers: dict[str, FakeWorker]
    registry: CollectorRegistry
    executor: RouterExecutor = field(init=False)

    async def attach(self, address: str) -> WorkerLink:
        """What the pool attaches with."""
        if address not in self.workers:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        return self.workers[address]

    def context(self, number: int = 0) -> FakeWorker:
        """The context worker of that number."""
        return self.workers[f"tcp://context:{number + 1}"]

    def generation(self, number: int = 0) -> FakeWorker:
        """The generation (or aggregated) worker of that number."""
        return self.workers[f"tcp://generation:{number + 1}"]

    def request(self, prompt_tokens: int = 4, *, deadline_s: float | None = None, n: int = 1) -> GenerationRequest:
        """A request with a fresh client id."""
        return GenerationRequest(
            key=SequenceKey(self.executor.draw_client_id()),
            prompt_ids=pack_tokens(range(1, prompt_tokens + 1)),
            sampling=SamplingParams(max_tokens=8),
            deadline_s=deadline_s,
            n=n,
        )

    def send(self, prompt_tokens: int = 4, *, deadline_s: float | None = None) -> tuple[int, RecordingSink]:
        """Submit a request; returns its client id and the client's sink."""
        request = self.request(prompt_tokens, deadline_s=deadline_s)
        sink = RecordingSink()
        self.executor.submit_to(request, sink)
        return request.key.client_id, sink

    def send_all(self, n: int, prompt_tokens: int = 4) -> tuple[int, list[RecordingSink]]:
        """Submit a request for `n` sequences; returns its client id and a sink for each."""
        request = self.request(prompt_tokens, n=n)
        sinks = [RecordingSink() for _ in range(n)]
        self.executor.submit_to(request, *sinks)
        return request.key.client_id, sinks

    def assert_clean(self) -> None:
        """No request is open, no sink is registered, no lease waits, nothing is counted on a worker."""
        assert len(self.executor.ledger) == 0
        for worker in self.workers.values():
            assert worker.sinks == {}
            assert worker.leases == set()
        for slot in self.executor.pool.slots():
            if slot.worker is not None:
                assert (slot.worker.sequences, slot.worker.tokens) == (0, 0)


@asynccontextmanager
async def fake_cluster(
    context: int = 1, generation: int = 1, *, expect_live: bool = True, router: RouterConfig | None = None
) -> AsyncIterator[FakeCluster]:
    """A router over so many fake workers of each role; `context=0` makes the others aggregated."""
    epochs = itertools.count(1)
    others = Role.GENERATION if context else Role.AGGREGATED
    workers = {f"tcp://context:{n + 1}": FakeWorker(describe(Role.CONTEXT), next(epochs)) for n in range(context)}
    workers |= {f"tcp://generation:{n + 1}": FakeWorker(describe(others), next(epochs)) for n in range(generation)}
    config = ClusterConfig(
        router=router or RouterConfig(),
        workers=WorkersConfig(
            context=tuple(address for address in workers if "context" in address),
            generation=tuple(address for address in workers if "generation" in address),
        ),
    )
    cluster = FakeCluster(workers, CollectorRegistry())
    cluster.executor = RouterExecutor(config, ClientIds(5), cluster.attach, cluster.registry, draw=random.Random(1))
    cluster.executor.start()
    if expect_live:
        await until(lambda: all(slot.state is WorkerState.LIVE for slot in cluster.executor.pool.slots()))
    try:
        yield cluster
    finally:
        await cluster.executor.aclose()


def router_config(**changes: object) -> RouterConfig:
    """The default router section with some settings changed."""
    return msgspec.convert(changes, RouterConfig)
