"""The pool: attaches, refuses what does not fit, notices loss, attaches again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router import pool as pool_module
from router.pool import WorkerPool
from router.workers import WorkerLink, WorkerSlot, WorkerState
from tests.support.fake_cluster import fake_cluster, until
from tests.support.fake_remote import LAYOUT, FakeWorker, describe
from twostroke.executor.base import HealthState
from twostroke.protocol.config import WorkersConfig
from twostroke.protocol.errors import ConfigError, EngineDeadError
from twostroke.protocol.transfer import LayoutFingerprint
from twostroke.protocol.worker import Role

OTHER_LAYOUT = LayoutFingerprint("digest", "float32", 32, 2, 2, 8)


def unexpected(error: BaseException) -> None:
    """No task of the pool may break."""
    raise error


@asynccontextmanager
async def running_pool(config: WorkersConfig, workers: dict[str, FakeWorker]) -> AsyncIterator[WorkerPool]:
    """A pool alone, over `workers`."""

    async def attach(address: str) -> WorkerLink:
        if address not in workers:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        return workers[address]

    pool = WorkerPool(config, attach, 2.0, on_change=lambda: None, on_broken=unexpected)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def slot_at(pool: WorkerPool, address: str) -> WorkerSlot:
    """The slot of one address."""
    return next(slot for slot in pool.slots() if slot.address == address)


async def test_ready_needs_every_role() -> None:
    """STARTING without a generation worker, READY with one that is only silent, STARTING when it dies."""
    async with fake_cluster(context=1, generation=1, expect_live=False) as cluster:
        late = cluster.workers.pop("tcp://generation:1")
        await until(lambda: cluster.executor.pool.missing_role() is Role.GENERATION)
        health = cluster.executor.check_health()
        assert (health.state, health.reason) == (
            HealthState.STARTING,
            "no live generation worker; try again later (the admin port says why at /workers)",
        )
        cluster.workers["tcp://generation:1"] = late
        await cluster.executor.ready()
        assert cluster.executor.check_health().state is HealthState.READY
        late.silence_s = 3.0
        await until(lambda: not cluster.executor.pool.live(Role.GENERATION))
        assert cluster.executor.check_health().state is HealthState.READY
        del cluster.workers["tcp://generation:1"]
        late.die()
        await until(lambda: cluster.executor.check_health().state is HealthState.STARTING)


async def test_attaches_again_to_the_next_epoch() -> None:
    """A dead worker's address is attached to again; what is there then is another epoch with no work counted."""
    async with fake_cluster() as cluster:
        cluster.send()
        cluster.context().die()
        cluster.workers["tcp://context:1"] = FakeWorker(describe(Role.CONTEXT), epoch=77)
        await until(lambda: any(worker.link.epoch == 77 for worker in cluster.executor.pool.live(Role.CONTEXT)))
        assert [worker.sequences for worker in cluster.executor.pool.live(Role.CONTEXT)] == [0]
        cluster.send()
        assert len(cluster.context().requests) == 1


async def test_other_layout_is_refused_with_both_fingerprints() -> None:
    """A worker whose cache has another layout could not take KV blocks; the reason shows both."""
    config = WorkersConfig(context=("tcp://c:1",), generation=("tcp://g:1",))
    workers = {"tcp://c:1": FakeWorker(describe(Role.CONTEXT))}
    async with running_pool(config, workers) as pool:
        await until(lambda: any(pool.live(Role.CONTEXT)))
        stranger = workers["tcp://g:1"] = FakeWorker(describe(Role.GENERATION, OTHER_LAYOUT))
        await until(lambda: stranger.closed)
        slot = slot_at(pool, "tcp://g:1")
        await until(lambda: "must share model and cache layout" in slot.reason)
        assert slot.state is WorkerState.ATTACHING
        assert str(LAYOUT) in slot.reason
        assert str(OTHER_LAYOUT) in slot.reason


@pytest.mark.parametrize(
    ("config", "role"),
    [
        (WorkersConfig(context=("tcp://w:1",), generation=("tcp://w:2",)), Role.AGGREGATED),
        (WorkersConfig(context=("tcp://w:1",), generation=("tcp://w:2",)), Role.GENERATION),
        (WorkersConfig(generation=("tcp://w:1",)), Role.CONTEXT),
        (WorkersConfig(generation=("tcp://w:1",)), Role.GENERATION),
    ],
)
async def test_wrong_role_is_refused(config: WorkersConfig, role: Role) -> None:
    """Each setting takes its own role; aggregated workers serve alone, where no context worker is configured."""
    worker = FakeWorker(describe(role))
    async with running_pool(config, {"tcp://w:1": worker}) as pool:
        await until(lambda: worker.closed)
        await until(lambda: f"a worker of role {role}, but" in slot_at(pool, "tcp://w:1").reason)


async def test_failed_tries_are_counted_and_explained() -> None:
    """An address where nobody answers stays attaching, and says why."""
    async with running_pool(WorkersConfig(generation=("tcp://w:1",)), {}) as pool:
        await until(lambda: slot_at(pool, "tcp://w:1").failures >= 2)
        slot = slot_at(pool, "tcp://w:1")
        assert (slot.state, slot.reason) == (WorkerState.ATTACHING, "nobody listens at tcp://w:1")


async def test_model_is_the_shortest_context_length() -> None:
    """Nothing is known before the first worker; then what any worker could not hold is not promised."""
    workers: dict[str, FakeWorker] = {}
    config = WorkersConfig(generation=("tcp://w:1", "tcp://w:2"))
    async with running_pool(config, workers) as pool:
        with pytest.raises(EngineDeadError, match="no worker has been attached yet"):
            _ = pool.model
        workers["tcp://w:1"] = FakeWorker(describe(Role.AGGREGATED, max_model_len=512))
        workers["tcp://w:2"] = FakeWorker(describe(Role.AGGREGATED, max_model_len=256))
        await until(lambda: len(list(pool.live(Role.AGGREGATED))) == 2)
        assert (pool.model.name, pool.model.max_model_len) == ("tiny", 256)
        for worker in list(workers.values()):
            worker.die()
        workers.clear()
        assert pool.model.max_model_len == 256


async def test_dns_name_follows_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """New addresses are attached to; one that the name no longer has is kept while its worker lives, and then left."""
    behind_name = ["tcp://10.0.0.1:7"]

    async def resolve(_: str) -> list[str]:
        return list(behind_name)

    monkeypatch.setattr(pool_module, "resolve", resolve)
    monkeypatch.setattr(pool_module, "RESOLVE_EVERY_S", 0.01)
    workers = {f"tcp://10.0.0.{n}:7": FakeWorker(describe(Role.AGGREGATED)) for n in (1, 2)}
    async with running_pool(WorkersConfig(generation=("dns://headless:7",)), workers) as pool:
        await until(lambda: len(list(pool.live(Role.AGGREGATED))) == 1)
        behind_name[:] = ["tcp://10.0.0.2:7"]
        await until(lambda: len(list(pool.live(Role.AGGREGATED))) == 2)
        await until(lambda: not slot_at(pool, "tcp://10.0.0.1:7").wanted)
        workers["tcp://10.0.0.1:7"].die()
        await until(lambda: [slot.address for slot in pool.slots()] == ["tcp://10.0.0.2:7"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WorkersConfig(), "workers.generation: the router needs at least one"),
        (WorkersConfig(context=("tcp://c:1",)), "workers.generation: the router needs at least one"),
        (WorkersConfig(context=("tcp://w:1",), generation=("tcp://w:1",)), "tcp://w:1 is listed twice"),
        (WorkersConfig(context=("c:1",), generation=("tcp://g:1",)), "workers.context: expected tcp"),
    ],
)
def test_wrong_settings(config: WorkersConfig, message: str) -> None:
    """The router does not start with workers that it could never use."""

    async def attach(_: str) -> WorkerLink:
        raise AssertionError

    with pytest.raises(ConfigError, match=message):
        WorkerPool(config, attach, 2.0, on_change=lambda: None, on_broken=unexpected)


async def test_a_bug_in_attaching_is_no_reason_to_give_an_address_up() -> None:
    """Whatever attaching raises, the address is tried again."""
    async with fake_cluster(context=0, generation=1, expect_live=False) as cluster:
        worker = cluster.workers.pop("tcp://generation:1")
        pool = cluster.executor.pool
        raised: list[str] = []

        async def attach(address: str) -> WorkerLink:
            if len(raised) < 2:
                raised.append(address)
                raise RuntimeError("bug")
            return worker

        pool._attach = attach
        await cluster.executor.ready()
        assert len(raised) == 2


async def test_a_broken_pool_ends_the_router() -> None:
    """Nobody would place waiting requests any more: pending ones fail, and the router says that it is dead."""
    async with fake_cluster() as cluster:
        _, sink = cluster.send()

        def explode() -> None:
            raise RuntimeError("bug")

        cluster.executor.pool._on_change = explode
        await until(lambda: bool(sink.finals))
        health = cluster.executor.check_health()
        assert (health.state, "RuntimeError('bug')" in health.reason) == (HealthState.DEAD, True)


async def test_shutdown_fails_what_is_pending_and_leaves() -> None:
    """Each pending request gets its one final event; links are closed; later submissions are refused."""
    async with fake_cluster() as cluster:
        sinks = [cluster.send()[1] for _ in range(3)]
        cluster.executor.shutdown()
        cluster.executor.shutdown()
        assert [[str(error) for error in sink.errors] for sink in sinks] == [["the router is shutting down"]] * 3
        assert all(worker.closed for worker in cluster.workers.values())
        assert cluster.executor.check_health().state is HealthState.DEAD
        with pytest.raises(EngineDeadError):
            cluster.send()
        assert len(cluster.executor.ledger) == 0
