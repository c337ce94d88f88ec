"""The sequences of one request for several (`n`): one leads, and the others follow it while it works for all.

A leader of phase `full` or `context_only` computes the prompt, and the first token of each is sampled from its last
logits. That of a generation worker has its K and V transferred, and leaves the prompt's full blocks in the prefix
cache, where the others find them.

    FOLLOWING --first token; full------------> RUNNING    on the leader's full blocks; WAITING if there is no slot
    FOLLOWING --first token; context_only----> LEASED     the leader's blocks, which each reader holds once
    FOLLOWING --the transfer has landed------> RESERVING
    FOLLOWING --the leader was given up------> WAITING or RESERVING: the first of them leads the others now
"""

from collections.abc import Iterable

from twostroke.engine.block_table import BlockTables
from twostroke.engine.scheduler import Scheduler
from twostroke.engine.sequence import Sequence, SequenceState
from twostroke.protocol.requests import GenerationRequest, Phase

_AWAITED = (SequenceState.RESERVING, SequenceState.TRANSFERRING)


class Siblings:
    """Moves followers on when their leader has done its part.

    Args:
        scheduler: Where sequences queue.
        tables: Their blocks.
        prefix_caching: Whether what one transfer brings is found by others.
    """

    def __init__(self, scheduler: Scheduler, tables: BlockTables, *, prefix_caching: bool) -> None:
        self._scheduler = scheduler
        self._tables = tables
        self._prefix_caching = prefix_caching

    def awaited_by(self, request: GenerationRequest, siblings: Iterable[Sequence]) -> Sequence | None:
        """The one of `siblings`, if any, whose transfer will bring a handed-over `request` blocks that it needs."""
        if request.phase is not Phase.GENERATION_ONLY or not self._prefix_caching:
            return None
        return next((one for one in siblings if one.state in _AWAITED), None)

    def fork(self, sequence: Sequence) -> None:
        """A sequence got its first token: if it follows another, it goes on from the full blocks of that one."""
        leader = sequence.leader
        if leader is None:
            return
        self._scheduler.remove(sequence)
        if self._scheduler.seats(sequence):
            self._tables.fork(leader, sequence)
        else:
            sequence.move(SequenceState.WAITING)
        _part(sequence)
        self._scheduler.enqueue(sequence)

    def lease(self, sequence: Sequence) -> None:
        """Lease the blocks of a sequence, or those that its leader computed for it."""
        if sequence.leader is None:
            self._tables.lease(sequence)
        else:
            self._tables.share_lease(sequence.leader, sequence)
            _part(sequence)

    def dismiss(self, leader: Sequence) -> None:
        """The transfer of `leader` has landed; its followers find what it brought."""
        for follower in list(leader.followers):
            _part(follower)
            self._requeue(follower)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        _part(sequence)
        self.hand_on_lead(sequence)

    def hand_on_lead(self, leader: Sequence) -> None:
        """A sequence was given up: the first of its followers, if it has any, leads the others."""
        if not leader.followers:
            return
        heir, *others = leader.followers
        leader.followers, heir.leader, heir.followers = [], None, others
        for other in others:
            other.leader = heir
        self._requeue(heir)

    def _requeue(self, follower: Sequence) -> None:
        """Wait for blocks of its own."""
        self._scheduler.remove(follower)
        follower.move(follower.queue_state)
        self._scheduler.enqueue(follower)


def _part(follower: Sequence) -> None:
    """From here on `follower` goes its own way."""
    leader, follower.leader = follower.leader, None
    if leader is not None:
        leader.followers.remove(follower)
