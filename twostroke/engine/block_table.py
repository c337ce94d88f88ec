"""Which blocks each sequence holds, and as what, through its life.

    take      admission: shared blocks from the prefix cache, fresh ones for the rest
    grow      room for the next tokens
    publish   full blocks, once the step that wrote them ran, become findable
    fork      a sibling goes on from the prompt's full blocks, and shares them
    lease     context: the blocks stay for the transfer to read
    reserve   generation: shared blocks are pinned, fresh ones wait for the transfer
    land      generation: the transfer is done
    quarantine, release

A sequence's holds follow from its state (`holds_of`), which is also how the accounting is checked.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.engine.block_manager import BlockAccountingError, BlockManager, Hold
from twostroke.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Fit:
    """The blocks that a sequence needs: `shared` ones from the prefix cache, first in its table, and `fresh` more."""

    shared: list[int]
    fresh: int


def holds_of(sequence: Sequence) -> list[tuple[Hold, list[int]]]:
    """As what a sequence in its present state holds its blocks; parts of its table, first to last."""
    blocks, landing = sequence.blocks, sequence.landing
    match sequence.state:
        case SequenceState.RUNNING:
            return [(Hold.ACTIVE, blocks)]
        case SequenceState.LEASED:
            return [(Hold.LEASED, blocks)]
        case SequenceState.TRANSFERRING | SequenceState.CANCELLING:
            return [(Hold.ACTIVE, blocks[:landing]), (Hold.RESERVED, blocks[landing:])]
        case SequenceState.QUARANTINED:
            return [(Hold.QUARANTINED, blocks)]
    return []


class BlockTables:
    """Moves blocks between the sequences and the block manager.

    Attributes:
        cached_tokens: Prompt tokens found in the prefix cache so far, each sequence counted once.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.cached_tokens = 0

    def fit(self, sequence: Sequence) -> Fit:
        """What a sequence needs to be computed: blocks for all its tokens.

        The block of the last token is never shared: it is computed (again) for its logits, in a private block. Nor is
        any of a prompt whose tokens' logprobs are asked for.
        """
        shareable = 0 if sequence.scores_prompt else (len(sequence.token_ids) - 1) // self._manager.block_size
        return self._fit(sequence, len(sequence.token_ids), shareable)

    def fit_handover(self, sequence: Sequence) -> Fit:
        """What a generation_only sequence needs: blocks for the positions that its context phase computed."""
        return self._fit(sequence, sequence.handed_over, sequence.handed_over // self._manager.block_size)

    def take(self, sequence: Sequence, fit: Fit) -> None:
        """Give a waiting sequence its blocks, so that it runs; what the shared ones hold needs no computing."""
        self._fill(sequence, fit, Hold.ACTIVE)
        sequence.move(SequenceState.RUNNING)
        sequence.computed = sequence.published * self._manager.block_size

    def grow(self, sequence: Sequence, positions: int) -> bool:
        """Let the table of a running sequence cover `positions`; false, and unchanged, if there is no room."""
        missing = self._manager.blocks_for(positions) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self._manager.available:
            return False
        sequence.blocks += self._manager.allocate(missing, Hold.ACTIVE)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks of a running sequence that are full and written to the prefix cache."""
        full = sequence.computed // self._manager.block_size
        if not self._manager.prefix_caching or full <= sequence.published:
            return
        hashes = sequence.block_hashes(full, self._manager.block_size)
        for index in range(sequence.published, full):
            self._manager.publish(sequence.blocks[index], hashes[index])
        sequence.published = full

    def fork(self, leader: Sequence, follower: Sequence) -> None:
        """Let `follower` run from the full blocks that `leader` has computed; the prompt's rest it computes again."""
        full = leader.computed // self._manager.block_size
        follower.blocks = leader.blocks[:full]
        self._manager.hold(follower.blocks, Hold.ACTIVE)
        follower.computed = full * self._manager.block_size
        follower.published = full
        follower.move(SequenceState.RUNNING)

    def share_lease(self, leader: Sequence, follower: Sequence) -> None:
        """Lease all blocks of `leader`, whatever becomes of it, for `follower` too: each reader holds them once."""
        follower.blocks = leader.blocks[: self._manager.blocks_for(leader.computed)]
        self._manager.hold(follower.blocks, Hold.LEASED)
        follower.move(SequenceState.LEASED)

    def lease(self, sequence: Sequence) -> None:
        """Keep the written blocks of a running sequence for a transfer to read, and give up any beyond."""
        written = self._manager.blocks_for(sequence.computed)
        self._manager.release(reversed(sequence.blocks[written:]), Hold.ACTIVE)
        del sequence.blocks[written:]
        self._manager.move(sequence.blocks, Hold.ACTIVE, Hold.LEASED)
        sequence.move(SequenceState.LEASED)

    def reserve(self, sequence: Sequence, fit: Fit) -> None:
        """Pin what the prefix cache holds of a handed-over sequence, and reserve blocks for the rest."""
        self._fill(sequence, fit, Hold.RESERVED)
        sequence.move(SequenceState.TRANSFERRING)

    def land(self, sequence: Sequence) -> None:
        """The transfer wrote all reserved blocks: they become part of a running sequence."""
        self._manager.move(sequence.blocks[sequence.landing :], Hold.RESERVED, Hold.ACTIVE)
        sequence.computed = sequence.handed_over
        sequence.move(SequenceState.RUNNING)
        self.publish(sequence)

    def quarantine(self, sequence: Sequence) -> None:
        """A peer may still write to the reserved blocks: keep them from all use, and give up the pinned ones."""
        shared, reserved = sequence.blocks[: sequence.landing], sequence.blocks[sequence.landing :]
        self._manager.release(reversed(shared), Hold.ACTIVE)
        self._manager.move(reserved, Hold.RESERVED, Hold.QUARANTINED)
        sequence.blocks = reserved
        sequence.move(SequenceState.QUARANTINED)

    def release(self, sequence: Sequence, to: SequenceState) -> None:
        """Give all blocks up and enter the state `to` (`ENDED`, or `WAITING` after preemption).

        Later blocks go first: a block is of no use in the prefix cache without those before it.
        """
        for hold, blocks in reversed(holds_of(sequence)):
            self._manager.release(reversed(blocks), hold)
        sequence.blocks = []
        sequence.computed = sequence.published = sequence.landing = 0
        sequence.move(to)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compare the manager's holds with those of all `sequences`, and its counts with its holds.

        Raises:
            BlockAccountingError: A block is held by nobody, or by somebody unknown to the manager.
        """
        self._manager.check()
        expected: dict[Hold, dict[int, int]] = {hold: {} for hold in Hold}
        for sequence in sequences:
            for hold, blocks in holds_of(sequence):
                for block in blocks:
                    expected[hold][block] = expected[hold].get(block, 0) + 1
        for hold in Hold:
            held = self._manager.holds(hold)
            if held != expected[hold]:
                raise BlockAccountingError(f"{hold.value}: manager has {held}, sequences hold {expected[hold]}")

    def _fit(self, sequence: Sequence, positions: int, shareable: int) -> Fit:
        shared: list[int] = []
        if self._manager.prefix_caching:
            shared = self._manager.match(sequence.block_hashes(shareable, self._manager.block_size))
        return Fit(shared, self._manager.blocks_for(positions) - len(shared))

    def _fill(self, sequence: Sequence, fit: Fit, fresh_as: Hold) -> None:
        self._manager.hold(fit.shared, Hold.ACTIVE)
        sequence.blocks = fit.shared + self._manager.allocate(fit.fresh, fresh_as)
        sequence.published = sequence.landing = len(fit.shared)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(len(fit.shared) * self._manager.block_size, sequence.prompt_tokens)
            self.cached_tokens += sequence.cached_tokens
