"""Who gets a request, who waits, who is refused."""

from collections import Counter

import pytest

from router import dispatch as dispatch_module
from router.ledger import LedgerPhase
from tests.support.fake_cluster import FakeCluster, fake_cluster, router_config, until
from twostroke.protocol.errors import EngineDeadError, OverloadedError
from twostroke.protocol.requests import Phase
from twostroke.protocol.worker import Role, WorkerLoad

FULL = WorkerLoad(admitting=False)
OPEN = WorkerLoad()


def placed(cluster: FakeCluster) -> list[int]:
    """How many requests each context worker got."""
    return [len(cluster.context(number).requests) for number in range(3)]


async def test_equal_workers_share() -> None:
    """Idle workers take turns."""
    async with fake_cluster(context=3) as cluster:
        for _ in range(9):
            cluster.send()
        assert placed(cluster) == [3, 3, 3]


async def test_least_loaded_weighs_prompts() -> None:
    """Behind one long prompt nobody queues while others have short ones."""
    async with fake_cluster(context=3) as cluster:
        cluster.send(prompt_tokens=100)
        for _ in range(8):
            cluster.send(prompt_tokens=10)
        assert placed(cluster) == [1, 4, 4]


async def test_round_robin_ignores_load() -> None:
    """Turns, whatever the prompts."""
    policy = {"context": "round_robin", "generation": "round_robin"}
    async with fake_cluster(context=3, router=router_config(policy=policy)) as cluster:
        cluster.send(prompt_tokens=100)
        for _ in range(8):
            cluster.send(prompt_tokens=1)
        assert placed(cluster) == [3, 3, 3]


async def test_generation_workers_share_by_sequences() -> None:
    """Requests that are still in their context phase count for the generation worker that was chosen for them."""
    async with fake_cluster(generation=2) as cluster:
        for _ in range(6):
            cluster.send()
        chosen = Counter(entry.generation_worker for entry in cluster.executor.ledger.open_entries())
        assert sorted(chosen.values()) == [3, 3]


async def test_no_new_work_for_suspect_and_full_workers() -> None:
    """A silent worker and one at its cap of leases are passed over."""
    async with fake_cluster(context=3) as cluster:
        cluster.context(0).silence_s = 3.0
        await until(lambda: any(cluster.executor.pool.suspect(Role.CONTEXT)))
        cluster.context(1).load = FULL
        for _ in range(3):
            cluster.send()
        assert placed(cluster) == [0, 0, 3]


async def test_waits_until_a_worker_admits() -> None:
    """With every worker full, requests wait in order and start when one admits again."""
    async with fake_cluster() as cluster:
        cluster.context().load = FULL
        sent = [cluster.send()[0] for _ in range(3)]
        assert cluster.executor.waiting == 3
        assert cluster.executor.ledger.open_counts() == {LedgerPhase.QUEUED: 3}
        cluster.context().load = OPEN
        await until(lambda: len(cluster.context().requests) == 3)
        assert [request.key.client_id for request in cluster.context().requests] == sent
        assert cluster.executor.waiting == 0


async def test_nobody_overtakes_the_queue() -> None:
    """A request that comes when a worker has just freed itself stands behind those that wait."""
    async with fake_cluster() as cluster:
        cluster.context().load = FULL
        first, _ = cluster.send()
        cluster.context().load = OPEN
        second, _ = cluster.send()
        await until(lambda: len(cluster.context().requests) == 2)
        assert [request.key.client_id for request in cluster.context().requests] == [first, second]


async def test_queue_is_bounded() -> None:
    """One more than `max_queued` is refused with 503, and nothing of it is kept."""
    async with fake_cluster(router=router_config(max_queued=2)) as cluster:
        cluster.context().load = FULL
        for _ in range(2):
            cluster.send()
        with pytest.raises(OverloadedError, match="2 requests wait"):
            cluster.send()
        assert len(cluster.executor.ledger) == 2
        assert cluster.registry.get_sample_value("twostroke_router_refused_total") == 1


async def test_refused_at_once_without_workers() -> None:
    """Nothing to wait for: no live and no suspect worker in a needed role."""
    async with fake_cluster() as cluster:
        cluster.workers.pop("tcp://generation:1").die()
        await until(lambda: not cluster.executor.pool.live(Role.GENERATION))
        with pytest.raises(OverloadedError, match="no generation worker can take the request"):
            cluster.send()
        assert len(cluster.executor.ledger) == 0


async def test_a_worker_that_died_since_the_last_tick_costs_no_attempt() -> None:
    """It has nothing to do any more and so would be the least loaded; nobody is sent there."""
    async with fake_cluster(context=2, generation=2, router=router_config(max_attempts=1)) as cluster:
        cluster.context(0).die()
        cluster.generation(1).die()
        for _ in range(4):
            cluster.send()
        assert [len(cluster.context(number).requests) for number in range(2)] == [0, 4]
        assert {entry.attempt for entry in cluster.executor.ledger.open_entries()} == {0}


async def test_a_worker_that_recovers_gets_requests_at_once() -> None:
    """Whatever looked at it last: a worker is live or suspect, never neither."""
    async with fake_cluster() as cluster:
        cluster.context().silence_s = 3.0
        await until(lambda: bool(cluster.executor.pool.suspect(Role.CONTEXT)))
        cluster.context().silence_s = 0.0
        (slot,) = [slot for slot in cluster.executor.pool.slots() if slot.role is Role.CONTEXT]
        slot.refresh(2.0)
        cluster.send()
        assert len(cluster.context().requests) == 1


async def test_waiting_for_a_suspect_worker_that_dies() -> None:
    """Requests that waited for a silent worker are refused when it is given up."""
    async with fake_cluster() as cluster:
        cluster.context().silence_s = 3.0
        await until(lambda: any(cluster.executor.pool.suspect(Role.CONTEXT)))
        _, sink = cluster.send()
        assert sink.finals == 0
        cluster.workers.pop("tcp://context:1").die()
        await until(lambda: bool(sink.finals))
        assert [type(error) for error in sink.errors] == [OverloadedError]


async def test_waiting_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: after the limit the client is told to come again."""
    monkeypatch.setattr(dispatch_module, "MAX_WAIT_S", 0.05)
    async with fake_cluster() as cluster:
        cluster.context().load = FULL
        _, sink = cluster.send()
        await until(lambda: bool(sink.finals))
        assert [type(error) for error in sink.errors] == [OverloadedError]
        cluster.assert_clean()


async def test_abort_while_waiting() -> None:
    """A client that leaves the queue is never sent to a worker."""
    async with fake_cluster() as cluster:
        cluster.context().load = FULL
        client_id, sink = cluster.send()
        cluster.executor.abort_request(client_id)
        cluster.context().load = OPEN
        cluster.send()
        await until(lambda: bool(cluster.context().requests))
        assert [request.key.client_id for request in cluster.context().requests] != [client_id]
        assert (sink.finals, cluster.executor.waiting) == (1, 0)


async def test_retry_waits_for_a_full_worker() -> None:
    """A context phase whose worker died waits for the other one, which is full just now."""
    async with fake_cluster(context=2) as cluster:
        cluster.context(1).load = FULL
        _, sink = cluster.send()
        cluster.context(0).die()
        assert (sink.finals, cluster.executor.waiting) == (0, 1)
        cluster.context(1).load = OPEN
        await until(lambda: bool(cluster.context(1).requests))
        assert cluster.context(1).last.key.attempt == 1


async def test_retry_without_another_worker_ends() -> None:
    """The only context worker dies: the client hears how it died."""
    async with fake_cluster() as cluster:
        _, sink = cluster.send()
        cluster.context().die("killed by signal 9")
        assert [(type(error), str(error)) for error in sink.errors] == [(EngineDeadError, "killed by signal 9")]


async def test_a_full_generation_worker_still_takes_over() -> None:
    """The context phase is paid for: a generation worker that admits nothing new gets the hand-over all the same."""
    async with fake_cluster() as cluster:
        cluster.send()
        cluster.generation().load = FULL
        cluster.context().hand_over(cluster.context().last)
        assert cluster.generation().last.phase is Phase.GENERATION_ONLY


async def test_only_plain_requests_of_new_ids() -> None:
    """The router chooses phases itself, and a client id is under way once."""
    async with fake_cluster() as cluster:
        request = cluster.request()
        cluster.executor.submit(request)
        with pytest.raises(ValueError, match="under way already"):
            cluster.executor.submit(request)
