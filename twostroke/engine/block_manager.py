"""Accounting of KV blocks: who holds which, and what state that puts each block in.

A block is held any number of times, each time as one of four things (`Hold`). Its state follows from its holds and from
the prefix cache; the first line that applies counts:

    quarantined   held as such: a peer may still write to it, so nobody may use it
    reserved      held for a KV transfer that has not landed yet
    leased        held so that a KV transfer can read it
    active        held by a sequence that runs
    cached        held by nobody, but published in the prefix cache; may be evicted
    free          none of these

Every block is in exactly one state, so the counts sum to the number of blocks at all times. Nothing here knows of
sequences or tensors.
"""

import enum
from collections.abc import Iterable, Sequence

from twostroke.engine.prefix_cache import PrefixCache
from twostroke.protocol.worker import BlockCounts


class Hold(enum.Enum):
    """As what a block is held; in the order in which holds decide the block's state."""

    QUARANTINED = "quarantined"
    RESERVED = "reserved"
    LEASED = "leased"
    ACTIVE = "active"


class BlockState(enum.Enum):
    """What a block is; see the module's docstring."""

    QUARANTINED = "quarantined"
    RESERVED = "reserved"
    LEASED = "leased"
    ACTIVE = "active"
    CACHED = "cached"
    FREE = "free"


_STATE_OF_HOLD = {hold: BlockState(hold.value) for hold in Hold}


class BlockAccountingError(RuntimeError):
    """The accounting was used wrongly or is broken; always a bug, and fatal to the engine."""


class BlockManager:
    """All KV blocks of one rank.

    Args:
        num_blocks: How many blocks there are.
        block_size: Tokens in a block.
        prefix_caching: Whether blocks are published and found again; without it no block is ever `cached`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._holds = {hold: [0] * num_blocks for hold in Hold}
        self._states = [BlockState.FREE] * num_blocks
        self._numbers = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold the K and V of `positions` tokens."""
        return -(-positions // self.block_size)

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        return BlockCounts(**{state.value: number for state, number in self._numbers.items()})

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out: the free ones, and the cached ones by evicting them."""
        return self._numbers[BlockState.FREE] + self._numbers[BlockState.CACHED]

    def number(self, state: BlockState) -> int:
        """How many blocks are in `state`."""
        return self._numbers[state]

    def state(self, block: int) -> BlockState:
        """The state of `block`."""
        return self._states[block]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks for the longest prefix of `hashes`; hold them first, since allocating may evict."""
        return self._cache.match(hashes)

    def available_beside(self, blocks: Iterable[int]) -> int:
        """What `available` would be once `blocks` are held."""
        return self.available - sum(self._states[block] is BlockState.CACHED for block in blocks)

    def allocate(self, count: int, hold: Hold) -> list[int]:
        """Hold `count` blocks that nobody holds; free ones first, then the longest idle of the prefix cache.

        Raises:
            BlockAccountingError: Fewer are available; callers look first.
        """
        if count > self.available:
            raise BlockAccountingError(f"{count} blocks asked for, {self.available} of {self.num_blocks} available")
        return [self._allocate_one(hold) for _ in range(count)]

    def hold(self, blocks: Iterable[int], hold: Hold) -> None:
        """Hold each of `blocks` once more. Their contents must be valid: published, active or leased.

        Raises:
            BlockAccountingError: A block is free, reserved or quarantined.
        """
        for block in blocks:
            if self._states[block] not in (BlockState.LEASED, BlockState.ACTIVE, BlockState.CACHED):
                raise BlockAccountingError(f"block {block} is {self._states[block].value} and cannot be shared")
            self._holds[hold][block] += 1
            self._settle(block)

    def release(self, blocks: Iterable[int], hold: Hold) -> None:
        """Give up one hold on each of `blocks`, in this order: of those that become cached, the first is evicted first.

        Raises:
            BlockAccountingError: A block is not held as `hold`.
        """
        for block in blocks:
            self._drop(block, hold)
            self._settle(block)

    def move(self, blocks: Iterable[int], held: Hold, to: Hold) -> None:
        """Turn one hold on each of `blocks` into another.

        Raises:
            BlockAccountingError: A block is not held as `held`.
        """
        for block in blocks:
            self._drop(block, held)
            self._holds[to][block] += 1
            self._settle(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let prompts find `block`, whose K and V are all written, unless another block has this hash already.

        Raises:
            BlockAccountingError: Nobody holds the block as active, so its contents are nobody's.
        """
        if not self._holds[Hold.ACTIVE][block]:
            raise BlockAccountingError(f"block {block} is {self._states[block].value} and cannot be published")
        if self.prefix_caching:
            self._cache.publish(block, block_hash)

    def check(self) -> None:
        """Recount everything.

        Raises:
            BlockAccountingError: Something does not add up; the message says what.
        """
        for block in range(self.num_blocks):
            if self._states[block] is not self._state_by_holds(block):
                raise BlockAccountingError(f"block {block} is {self._states[block]}, not {self._state_by_holds(block)}")
        for state in BlockState:
            actual = self._states.count(state)
            if self._numbers[state] != actual:
                raise BlockAccountingError(f"{actual} blocks are {state.value}, counted {self._numbers[state]}")
        by_state = {state: {b for b, s in enumerate(self._states) if s is state} for state in BlockState}
        if len(self._free) != len(by_state[BlockState.FREE]) or set(self._free) != by_state[BlockState.FREE]:
            raise BlockAccountingError(f"free list {self._free} against free blocks {by_state[BlockState.FREE]}")
        if self._cache.idle != by_state[BlockState.CACHED] or not self._cache.consistent():
            raise BlockAccountingError(f"idle {self._cache.idle} against cached blocks {by_state[BlockState.CACHED]}")

    def holds(self, hold: Hold) -> dict[int, int]:
        """How often each block is held as `hold`; blocks that are not are left out."""
        return {block: times for block, times in enumerate(self._holds[hold]) if times}

    def _allocate_one(self, hold: Hold) -> int:
        evicting = not self._free
        block = self._cache.evict() if evicting else self._free.pop()
        self._holds[hold][block] += 1
        self._count(block, _STATE_OF_HOLD[hold])
        return block

    def _drop(self, block: int, hold: Hold) -> None:
        if not self._holds[hold][block]:
            raise BlockAccountingError(f"block {block} is {self._states[block].value}, not held as {hold.value}")
        self._holds[hold][block] -= 1

    def _state_by_holds(self, block: int) -> BlockState:
        for hold in Hold:
            if self._holds[hold][block]:
                return _STATE_OF_HOLD[hold]
        return BlockState.CACHED if block in self._cache else BlockState.FREE

    def _settle(self, block: int) -> None:
        """Put `block`, one of whose holds changed, into the state that follows."""
        before, after = self._states[block], self._state_by_holds(block)
        if before is after:
            return
        if before is BlockState.CACHED:
            self._cache.mark_held(block)
        if after is BlockState.CACHED:
            self._cache.mark_idle(block)
        if after is BlockState.FREE:
            self._free.append(block)
        self._count(block, after)

    def _count(self, block: int, state: BlockState) -> None:
        self._numbers[self._states[block]] -= 1
        self._numbers[state] += 1
        self._states[block] = state
