"""Two agents in one process: whole transfers over loopback and over UCX."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from kvtransfer.events import FetchEnded, LeaseEnded, TransferOutcome
from kvtransfer.loopback import LoopbackFabric
from kvtransfer.options import BackendKind, TransferTimeouts
from tests.support.transfer import Worker, context_memory, expected_content, generation_memory
from twostroke.protocol.errors import EngineDeadError
from twostroke.protocol.ids import SequenceKey

BLOCKS, SIZE = 64, 4096
KEY = SequenceKey(7, 0, 0)
QUICK = TransferTimeouts(ping_s=0.1, silence_s=0.6, park_s=0.3, stop_s=0.3)


class Pair:
    """A context worker and a generation worker."""

    def __init__(self, kind: BackendKind, timeouts: TransferTimeouts = QUICK) -> None:
        self.fabric = LoopbackFabric() if kind is BackendKind.LOOPBACK else None
        self.context = Worker(context_memory(BLOCKS, SIZE), fabric=self.fabric, timeouts=timeouts)
        self.generation = Worker(generation_memory(BLOCKS, SIZE), fabric=self.fabric, timeouts=timeouts)

    def close(self) -> None:
        """End both."""
        self.generation.close()
        self.context.close()


@pytest.fixture(params=list(BackendKind))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The pair over each transport."""
    made = Pair(request.param)
    yield made
    made.close()


def test_blocks_arrive_where_they_were_asked_for_and_nowhere_else(pair: Pair) -> None:
    """Scattered blocks, some of them neighbours on both sides; every other block keeps its canaries."""
    leased, positions, blocks = [9, 10, 11, 40, 2, 63], [0, 1, 2, 4, 5], [20, 21, 22, 0, 50]
    handle = pair.context.agent.offer(KEY, leased, 5.0)
    pair.generation.agent.fetch(1, handle, positions, blocks, 5.0)

    assert pair.generation.fetch_end(1) == FetchEnded(1, TransferOutcome.DONE, True, 5)
    assert pair.context.lease_end(KEY) == LeaseEnded(KEY, TransferOutcome.DONE)
    pair.generation.assert_only_written(expected_content(positions, leased, blocks))
    counters = pair.context.agent.counters()
    assert counters.bytes_written == 5 * SIZE
    assert counters.operations == 4, "three runs and a flush"
    assert counters.leases_open == 0
    assert pair.generation.wakes >= 1


def test_many_transfers_at_once_share_a_connection(pair: Pair) -> None:
    """Thirty leases of two blocks each are all served."""
    expected: dict[int, int] = {}
    for number in range(30):
        key = SequenceKey(number)
        leased, blocks = [number, 63 - number], [2 * number, 2 * number + 1]
        handle = pair.context.agent.offer(key, leased, 5.0)
        pair.generation.agent.fetch(number, handle, [0, 1], blocks, 5.0)
        expected |= expected_content([0, 1], leased, blocks)
    for number in range(30):
        assert pair.generation.fetch_end(number).outcome is TransferOutcome.DONE
        assert pair.context.lease_end(SequenceKey(number)).outcome is TransferOutcome.DONE
    pair.generation.assert_only_written(expected)


def test_a_fetch_of_no_blocks_ends_the_lease(pair: Pair) -> None:
    """The generation worker had everything cached."""
    handle = pair.context.agent.offer(KEY, [1, 2], 5.0)
    pair.generation.agent.fetch(1, handle, [], [], 5.0)
    assert pair.generation.fetch_end(1) == FetchEnded(1, TransferOutcome.DONE, True, 0)
    assert pair.context.lease_end(KEY).outcome is TransferOutcome.DONE
    pair.generation.assert_only_written({})


def test_a_lease_nobody_fetches_expires(pair: Pair) -> None:
    """The expiry ends it, and a late fetch is told so."""
    handle = pair.context.agent.offer(KEY, [1], 0.1)
    assert pair.context.lease_end(KEY).outcome is TransferOutcome.EXPIRED
    pair.generation.agent.fetch(1, handle, [0], [3], 5.0)
    ended = pair.generation.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.EXPIRED, True)


def test_a_revoked_lease_is_not_served(pair: Pair) -> None:
    """The context worker's abort wins over a later fetch."""
    handle = pair.context.agent.offer(KEY, [1], 5.0)
    pair.context.agent.revoke(KEY)
    assert pair.context.lease_end(KEY).outcome is TransferOutcome.CANCELLED
    pair.generation.agent.fetch(1, handle, [0], [3], 5.0)
    ended = pair.generation.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.CANCELLED, True)
    pair.generation.assert_only_written({})


def test_a_tampered_handle_is_refused(pair: Pair) -> None:
    """More blocks than leased, claimed by a changed handle."""
    handle = msgspec.structs.replace(pair.context.agent.offer(KEY, [1], 1.0), blocks=2)
    pair.generation.agent.fetch(1, handle, [1], [3], 5.0)
    ended = pair.generation.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, True)
    assert "not signed" in ended.reason
    pair.generation.assert_only_written({})


def test_cancels_at_random_moments_leave_both_sides_in_agreement(pair: Pair) -> None:
    """A storm of fetches, cancels and revokes: each lease and fetch ends once, blocks never hold anything else."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for number in range(150):
        handle = pair.context.agent.offer(SequenceKey(number), [number % BLOCKS, (number + 9) % BLOCKS], 5.0)
        pair.generation.agent.fetch(number, handle, [1], [number % BLOCKS], 5.0)
        if draw.random() < 0.5:
            pair.generation.agent.cancel(draw.randrange(number + 1))
        if draw.random() < 0.2:
            pair.context.agent.revoke(SequenceKey(draw.randrange(number + 1)))
        if number % BLOCKS == BLOCKS - 1:
            for earlier in range(number + 1):
                assert pair.generation.fetch_end(earlier).blocks_safe
    for number in range(150):
        assert pair.generation.fetch_end(number).blocks_safe
        lease = pair.context.lease_end(SequenceKey(number))
        if pair.generation.fetch_end(number).outcome is TransferOutcome.DONE:
            assert lease.outcome is TransferOutcome.DONE
    assert pair.generation.agent.counters().quarantined == 0
    assert pair.context.agent.counters().leases_open == 0


def test_another_secret_reaches_nobody() -> None:
    """The control connection never comes up, so the fetch ends by silence; the context worker sees no message."""
    fabric = LoopbackFabric()
    context = Worker(context_memory(4, SIZE), fabric=fabric, timeouts=QUICK)
    stranger = Worker(generation_memory(4, SIZE), fabric=fabric, timeouts=QUICK, secret=bytes(32))
    stranger.agent.fetch(1, context.agent.offer(KEY, [1], 5.0), [0], [1], 5.0)
    ended = stranger.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
    stranger.safe(1)
    assert context.agent.counters().leases_open == 1
    stranger.assert_only_written({})
    stranger.close()
    context.close()
    assert context.lease_end(KEY).outcome is TransferOutcome.CANCELLED


def test_a_restarted_context_worker_fails_old_handles_at_once() -> None:
    """A new epoch at the same address: no waiting for silence or deadlines; the new epoch's leases work."""
    fabric = LoopbackFabric()
    patient = TransferTimeouts()
    before = Worker(context_memory(4, SIZE), fabric=fabric, timeouts=patient)
    old = before.agent.offer(KEY, [1], 60.0)
    before.close()
    after = Worker(context_memory(4, SIZE), fabric=fabric, timeouts=patient, bind=old.address)
    generation = Worker(generation_memory(4, SIZE), fabric=fabric, timeouts=patient)
    generation.agent.fetch(1, old, [0], [2], 60.0)
    ended = generation.fetch_end(1, timeout_s=4.0)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
    assert "restarted" in ended.reason
    generation.safe(1)
    generation.agent.fetch(2, after.agent.offer(KEY, [1], 60.0), [0], [2], 60.0)
    assert generation.fetch_end(2).outcome is TransferOutcome.DONE
    generation.assert_only_written({2: 1})
    generation.close()
    after.close()


def test_the_engine_cannot_misname_blocks_or_transfers() -> None:
    """Mistakes of the caller are told at once, where they are made."""
    pair = Pair(BackendKind.LOOPBACK)
    handle = pair.context.agent.offer(KEY, [1, 2], 5.0)
    with pytest.raises(ValueError, match="open lease already"):
        pair.context.agent.offer(KEY, [1], 5.0)
    with pytest.raises(ValueError, match="outside the cache of 64 blocks"):
        pair.context.agent.offer(SequenceKey(8), [64], 5.0)
    with pytest.raises(ValueError, match="different blocks"):
        pair.generation.agent.fetch(1, handle, [0, 1], [3, 3], 5.0)
    pair.generation.agent.fetch(1, handle, [0, 1], [3, 4], 5.0)
    with pytest.raises(ValueError, match="transfer 1 is open already"):
        pair.generation.agent.fetch(1, handle, [0, 1], [3, 4], 5.0)
    assert pair.generation.fetch_end(1).outcome is TransferOutcome.DONE
    pair.close()
    with pytest.raises(EngineDeadError, match="closed"):
        pair.context.agent.offer(SequenceKey(9), [1], 5.0)


def test_closing_cancels_what_is_open_and_says_so() -> None:
    """Last events can still be polled."""
    pair = Pair(BackendKind.UCX)
    handle = pair.context.agent.offer(KEY, [1], 5.0)
    unserved = msgspec.structs.replace(handle, address="tcp://127.0.0.1:1")
    pair.generation.agent.fetch(1, unserved, [0], [3], 60.0)
    pair.close()
    assert pair.generation.fetch_end(1).outcome is TransferOutcome.CANCELLED
    assert pair.context.lease_end(KEY).outcome is TransferOutcome.CANCELLED
