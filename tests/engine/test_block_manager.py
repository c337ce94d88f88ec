"""Block accounting: states, reference counts, and the refusal of every wrong move."""

import random
from collections.abc import Callable

import pytest

from twostroke.engine.block_manager import BlockAccountingError, BlockManager, BlockState, Hold
from twostroke.protocol.worker import BlockCounts

A, B = b"a" * 32, b"b" * 32


def test_the_state_is_that_of_the_first_hold_that_applies() -> None:
    """Quarantined before reserved before leased before active before cached before free."""
    manager = BlockManager(1, 4)
    [block] = manager.allocate(1, Hold.ACTIVE)
    manager.publish(block, A)
    manager.hold([block], Hold.LEASED)
    assert manager.state(block) is BlockState.LEASED
    manager.release([block], Hold.LEASED)
    assert manager.state(block) is BlockState.ACTIVE
    manager.release([block], Hold.ACTIVE)
    assert manager.state(block) is BlockState.CACHED
    assert manager.allocate(1, Hold.RESERVED) == [block]
    assert manager.state(block) is BlockState.RESERVED
    manager.move([block], Hold.RESERVED, Hold.QUARANTINED)
    assert manager.state(block) is BlockState.QUARANTINED
    manager.release([block], Hold.QUARANTINED)
    assert manager.counts == BlockCounts(free=1)
    manager.check()


def test_a_shared_block_is_kept_until_its_last_holder_gives_it_up() -> None:
    """Two sequences and a lease on one block."""
    manager = BlockManager(2, 4)
    blocks = manager.allocate(1, Hold.ACTIVE)
    manager.hold(blocks, Hold.ACTIVE)
    manager.move(blocks, Hold.ACTIVE, Hold.LEASED)
    assert manager.counts == BlockCounts(free=1, leased=1)
    manager.release(blocks, Hold.LEASED)
    assert manager.counts == BlockCounts(free=1, active=1)
    manager.release(blocks, Hold.ACTIVE)
    assert manager.counts == BlockCounts(free=2)


def test_free_blocks_are_used_before_cached_ones_and_those_released_first_are_evicted_first() -> None:
    """Eviction follows the order of release; an evicted block is not found any more."""
    manager = BlockManager(3, 4)
    first, second = manager.allocate(2, Hold.ACTIVE)
    manager.publish(first, A)
    manager.publish(second, B)
    manager.release([second, first], Hold.ACTIVE)
    assert manager.counts == BlockCounts(free=1, cached=2)
    assert manager.allocate(2, Hold.ACTIVE)[1] == second
    assert manager.match([A]) == [first]
    assert manager.match([B]) == []
    manager.check()


def test_a_duplicate_of_a_published_block_becomes_free() -> None:
    """Two sequences computed the same block: the prefix cache keeps one."""
    manager = BlockManager(2, 4)
    blocks = manager.allocate(2, Hold.ACTIVE)
    for block in blocks:
        manager.publish(block, A)
    manager.release(blocks, Hold.ACTIVE)
    assert manager.counts == BlockCounts(free=1, cached=1)


def test_without_prefix_caching_nothing_is_ever_cached() -> None:
    """Publishing does nothing then."""
    manager = BlockManager(1, 4, prefix_caching=False)
    blocks = manager.allocate(1, Hold.ACTIVE)
    manager.publish(blocks[0], A)
    manager.release(blocks, Hold.ACTIVE)
    assert manager.counts == BlockCounts(free=1)


def test_cached_blocks_that_will_be_shared_are_not_available() -> None:
    """Admission must not count on evicting what it is about to share."""
    manager = BlockManager(3, 4)
    blocks = manager.allocate(1, Hold.ACTIVE)
    manager.publish(blocks[0], A)
    assert (manager.available, manager.available_beside(blocks)) == (2, 2)
    manager.release(blocks, Hold.ACTIVE)
    assert (manager.available, manager.available_beside(blocks)) == (3, 2)


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(positions: int, blocks: int) -> None:
    """A partly filled block is a block."""
    assert BlockManager(1, 4).blocks_for(positions) == blocks


def test_wrong_moves_are_refused_with_the_block_and_its_state() -> None:
    """Each is a bug in the caller; none changes the counts."""
    manager = BlockManager(2, 4)
    [reserved] = manager.allocate(1, Hold.RESERVED)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("2 blocks asked for, 1 of 2 available", lambda: manager.allocate(2, Hold.ACTIVE)),
        ("block 0 is reserved and cannot be shared", lambda: manager.hold([reserved], Hold.ACTIVE)),
        ("block 1 is free and cannot be shared", lambda: manager.hold([1], Hold.ACTIVE)),
        ("block 0 is reserved, not held as active", lambda: manager.release([reserved], Hold.ACTIVE)),
        ("block 1 is free, not held as leased", lambda: manager.move([1], Hold.LEASED, Hold.ACTIVE)),
        ("block 0 is reserved and cannot be published", lambda: manager.publish(reserved, A)),
    ]
    for message, call in wrong:
        with pytest.raises(BlockAccountingError, match=message):
            call()
        assert manager.counts == BlockCounts(free=1, reserved=1)
        manager.check()


def test_check_notices_tampering() -> None:
    """The recount is independent of the running counts."""
    manager = BlockManager(2, 4)
    manager.allocate(1, Hold.ACTIVE)
    manager._holds[Hold.ACTIVE][0] = 0
    with pytest.raises(BlockAccountingError, match="block 0"):
        manager.check()


@pytest.mark.parametrize("seed", range(5))
def test_counts_sum_to_the_total_through_random_moves(seed: int) -> None:
    """Random legal moves; the manager is recounted after each."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    manager = BlockManager(8, 4)
    held: list[tuple[int, Hold]] = []
    for move in range(400):
        kind = rng.choice(["allocate", "release", "share", "move", "publish"])
        if kind == "allocate" and manager.available:
            hold = rng.choice(list(Hold))
            held += [(block, hold) for block in manager.allocate(rng.randint(1, manager.available), hold)]
        elif kind == "release" and held:
            block, hold = held.pop(rng.randrange(len(held)))
            manager.release([block], hold)
        elif kind == "share" and (found := manager.match([rng.choice([A, B])])):
            if manager.state(found[0]) in (BlockState.ACTIVE, BlockState.LEASED, BlockState.CACHED):
                manager.hold(found, Hold.ACTIVE)
                held.append((found[0], Hold.ACTIVE))
        elif kind == "move" and held:
            place = rng.randrange(len(held))
            block, hold = held[place]
            to = rng.choice(list(Hold))
            manager.move([block], hold, to)
            held[place] = (block, to)
        elif kind == "publish" and (new := [b for b, hold in held if hold is Hold.ACTIVE and b not in manager._cache]):
            manager.publish(rng.choice(new), rng.choice([A, B, bytes([move % 256]) * 32]))
        manager.check()
        assert manager.counts.total == 8
    for block, hold in held:
        manager.release([block], hold)
    assert manager.available == 8
