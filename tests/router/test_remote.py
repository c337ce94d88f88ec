"""The router over real attachments: CURVE sockets on loopback, scripted workers behind them."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from router.executor import RouterExecutor
from router.workers import WorkerState
from tests.support.fake_cluster import until
from tests.support.role_worker import RoleWorker, running_worker
from tests.support.scripted_worker import Act, expected_tokens
from twostroke.executor.base import HealthState
from twostroke.executor.remote import RemoteExecutor
from twostroke.executor.result import GenerationResult
from twostroke.ipc.secret import new_secret
from twostroke.protocol.config import ClusterConfig, WorkersConfig
from twostroke.protocol.errors import AbortedError, EngineDeadError
from twostroke.protocol.ids import ClientIds, SequenceKey, draw_frontend_id
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role


@dataclass(eq=False)
class Remote:
    """A router and the workers that it is attached to."""

    executor: RouterExecutor
    context: list[RoleWorker]
    generation: list[RoleWorker]
    secret: bytes

    def submit(self, *prompt: int, max_tokens: int = 5) -> GenerationResult:
        """Submit a request with this prompt."""
        key = SequenceKey(self.executor.draw_client_id())
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.executor.submit(GenerationRequest(key=key, prompt_ids=pack_tokens(prompt), sampling=sampling))


@asynccontextmanager
async def remote(context: int = 1, generation: int = 1) -> AsyncIterator[Remote]:
    """A router attached to so many workers; `context=0` makes the others aggregated."""
    secret = new_secret()
    role = Role.GENERATION if context else Role.AGGREGATED
    with ExitStack() as stack:
        prefill = [stack.enter_context(running_worker(Role.CONTEXT, secret)) for _ in range(context)]
        decode = [stack.enter_context(running_worker(role, secret)) for _ in range(generation)]
        workers = WorkersConfig(
            context=tuple(worker.address for worker in prefill), generation=tuple(worker.address for worker in decode)
        )
        client_ids = ClientIds(draw_frontend_id())
        attach = functools.partial(RemoteExecutor.attach, secret=secret, client_ids=client_ids)
        executor = RouterExecutor(ClusterConfig(workers=workers), client_ids, attach, CollectorRegistry())
        executor.start()
        try:
            await asyncio.wait_for(executor.ready(), 10)
            await until(lambda: all(slot.state is WorkerState.LIVE for slot in executor.pool.slots()))
            yield Remote(executor, prefill, decode, secret)
        finally:
            await executor.aclose()


async def test_two_roles_make_one_answer() -> None:
    """First token from the context worker, the others from the generation worker, nothing lost or repeated."""
    async with remote() as cluster:
        completion = await asyncio.wait_for(cluster.submit(3, 4).completion(), 10)
        assert completion.token_ids == expected_tokens([3, 4], 5)
        assert (completion.finish_reason, completion.cached_tokens) == (FinishReason.LENGTH, 1)
        assert (cluster.context[0].submitted, cluster.generation[0].submitted) == (1, 1)
        assert len(cluster.executor.ledger) == 0


async def test_one_token_needs_one_role() -> None:
    """`max_tokens=1` ends at the context worker."""
    async with remote() as cluster:
        completion = await asyncio.wait_for(cluster.submit(3, 4, max_tokens=1).completion(), 10)
        assert completion.token_ids == expected_tokens([3, 4], 1)
        assert cluster.generation[0].submitted == 0


async def test_aggregated_workers() -> None:
    """Without context workers the router shares requests between replicas that run both phases."""
    async with remote(context=0, generation=2) as cluster:
        results = [cluster.submit(number, 4) for number in range(8)]
        completions = await asyncio.wait_for(asyncio.gather(*(result.completion() for result in results)), 10)
        assert [one.token_ids for one in completions] == [expected_tokens([number, 4], 5) for number in range(8)]
        assert [worker.submitted for worker in cluster.generation] == [4, 4]


async def test_many_requests_over_several_workers() -> None:
    """Each answer is its own, whatever workers it went through."""
    async with remote(context=2, generation=2) as cluster:
        results = [cluster.submit(number, 1, max_tokens=20) for number in range(60)]
        completions = await asyncio.wait_for(asyncio.gather(*(result.completion() for result in results)), 20)
        assert [one.token_ids for one in completions] == [expected_tokens([number, 1], 20) for number in range(60)]
        assert sum(worker.submitted for worker in cluster.context) == 60
        assert sum(worker.submitted for worker in cluster.generation) == 60
        assert len(cluster.executor.ledger) == 0


async def test_context_worker_stops_and_the_other_takes_over() -> None:
    """A context worker that says goodbye before its first token: the request runs on the other one."""
    async with remote(context=2) as cluster:
        hanging = [cluster.submit(Act.HANG, number) for number in range(2)]
        await until(lambda: all(worker.submitted == 1 for worker in cluster.context))
        cluster.context[0].stop()
        await until(lambda: cluster.context[1].submitted == 2)
        for result in hanging:
            result.abort()
            with pytest.raises(AbortedError):
                await result.completion()
        await until(lambda: len(cluster.context[1].aborts) == 2)


async def test_last_context_worker_stops() -> None:
    """Nobody is left: the client gets one clear error, and the router turns unready."""
    async with remote() as cluster:
        result = cluster.submit(Act.HANG)
        await until(lambda: cluster.context[0].submitted == 1)
        cluster.context[0].stop()
        with pytest.raises(EngineDeadError, match="stops: the scripted worker was told to stop"):
            await asyncio.wait_for(result.completion(), 10)
        await until(lambda: cluster.executor.check_health().state is HealthState.STARTING)


async def test_client_leaves_in_the_stream() -> None:
    """The abort reaches the generation worker, which stops decoding."""
    async with remote() as cluster:
        result = cluster.submit(3, max_tokens=100_000)
        for _ in range(3):
            await asyncio.wait_for(result.next_output(), 10)
        result.abort()
        await until(lambda: [abort.client_id for abort in cluster.generation[0].aborts] == [result.key.client_id])
        await until(lambda: not cluster.generation[0].running)


async def test_restarted_worker_is_attached_to_again() -> None:
    """The next epoch at the same address serves the next request."""
    async with remote() as cluster:
        old = cluster.generation[0]
        old.stop()
        await until(lambda: cluster.executor.pool.missing_role() is Role.GENERATION)
        await until(old.closed.is_set)
        with running_worker(Role.GENERATION, cluster.secret, bind=old.address) as new:
            await until(lambda: cluster.executor.pool.missing_role() is None)
            completion = await asyncio.wait_for(cluster.submit(3, 4).completion(), 10)
            assert completion.token_ids == expected_tokens([3, 4], 5)
            assert new.submitted == 1
