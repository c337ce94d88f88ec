"""Decides which sequences run, and what each step computes of them.

Admission is first come, first served over all that wait for blocks, new requests, preempted sequences and hand-overs
alike; a sequence's age is its arrival, whatever happened to it since. The oldest that waits gets the next room, so none
starves: nothing younger is let in before it, except past one that waits for a *cap* of leases or reservations, which
transfers end within their deadlines.

* A sequence is admitted when there are blocks for all its tokens, and beside them a *watermark*: some blocks left free,
  so that those that run can grow for a while before any is preempted.
* No more are admitted than the step's token budget can feed. Late admission finds more in the prefix cache.
* A step computes first the sequences that decode, one token each, then chunks of prompts, oldest first. No more run
  than the budget has tokens, so those that decode never keep a prompt from going on.
* Prompts whose tokens' logprobs are asked for share a smaller budget of their own.
* If a running sequence needs a block and none is left, the youngest running one is preempted, perhaps itself: it gives
  up its blocks and waits, to be computed again. The oldest therefore always goes on.
"""

import bisect
import enum
import math
from dataclasses import dataclass
from typing import Self

from twostroke.engine.block_manager import BlockManager, BlockState
from twostroke.engine.block_table import BlockTables, Fit
from twostroke.engine.interfaces import SequenceSlice, Sibling, StepPlan
from twostroke.engine.sequence import Sequence, SequenceState
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.requests import Phase

WATERMARK_SHARE = 0.05
"""Share of the cache that admission leaves free at most; never more than a block for each running sequence."""

MAX_SCORED_TOKENS = 256
"""Prompt tokens of a step whose logprobs are asked for, at most: each needs a whole row of logits in memory."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one engine.

    Attributes:
        max_sequences: Sequences that run, or whose KV transfer is under way, at most.
        max_batched_tokens: Tokens of one step at most.
        max_leased: Leased blocks at most; one sequence alone may exceed it.
        max_reserved: Reserved blocks at most; one sequence alone may exceed it.
    """

    max_sequences: int
    max_batched_tokens: int
    max_leased: int
    max_reserved: int

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int) -> Self:
        """The config's shares in blocks; no more sequences run than the token budget can serve in one step."""
        return cls(
            max_sequences=min(config.max_sequences, config.max_batched_tokens),
            max_batched_tokens=config.max_batched_tokens,
            max_leased=max(1, int(config.kv_cache.max_leased_share * num_blocks)),
            max_reserved=max(1, int(config.kv_cache.max_reserved_share * num_blocks)),
        )


class _Admission(enum.Enum):
    """What came of trying to admit one sequence."""

    ADMITTED = enum.auto()
    CAPPED = enum.auto()
    NO_ROOM = enum.auto()


class Scheduler:
    """Queues of sequences by state; each is kept in order of age.

    Attributes:
        following: Wait for what a sibling does for them.
        waiting: Wait to be computed.
        reserving: Handed over; wait for blocks to receive their K and V.
        transferring: Their KV transfer is under way.
        running: In the batch.
        preemptions: How often a sequence was set back so far.
    """

    def __init__(self, manager: BlockManager, tables: BlockTables, limits: SchedulerLimits) -> None:
        self._manager = manager
        self._tables = tables
        self._limits = limits
        self.following: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.reserving: list[Sequence] = []
        self.transferring: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def queued(self) -> int:
        """Sequences that wait for admission, or for a sibling."""
        return len(self.waiting) + len(self.reserving) + len(self.following)

    @property
    def lease_capped(self) -> bool:
        """Whether leases, present and coming, keep the oldest waiting sequence, or any at all, from being admitted."""
        if self._leases_to_come() >= self._limits.max_leased:
            return True
        return bool(self.waiting) and self._is_lease_capped(self.waiting[0], self._tables.fit(self.waiting[0]))

    def seats(self, sequence: Sequence) -> bool:
        """Whether a sequence with blocks may run at once: there is a slot, and nothing older waits for it."""
        return self._has_slot() and not (self.waiting and _age(self.waiting[0]) < _age(sequence))

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence where its state says that it belongs."""
        queue = self._queue(sequence)
        if queue is not None:
            bisect.insort(queue, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue, before its state changes."""
        queue = self._queue(sequence)
        if queue is not None:
            del queue[bisect.bisect_left(queue, _age(sequence), key=_age)]

    def admit(self) -> list[Sequence]:
        """Let in what there is room for; returns the sequences that got blocks reserved for a transfer."""
        reserved: list[Sequence] = []
        queues = [self.waiting, self.reserving]
        while self._has_slot():
            queue = min((queue for queue in queues if queue), key=lambda queue: _age(queue[0]), default=None)
            if queue is None:
                break
            sequence = queue[0]
            admission = self._try_admit(sequence)
            if admission is _Admission.NO_ROOM:
                break
            if admission is _Admission.CAPPED:
                queues = [other for other in queues if other is not queue]
            elif sequence.state is SequenceState.TRANSFERRING:
                reserved.append(sequence)
        return reserved

    def schedule(self) -> StepPlan:
        """What the next step computes. May preempt, and so change who runs."""
        slices: dict[int, SequenceSlice] = {}
        for sequence in [one for one in self.running if one.remaining == 1]:
            self._plan(sequence, 1, slices)
        for sequence in [one for one in self.running if one.remaining > 1]:
            budget = self._limits.max_batched_tokens - sum(len(part.token_ids) for part in slices.values())
            if budget <= 0:
                break
            if sequence.scores_prompt:
                budget = min(budget, MAX_SCORED_TOKENS - sum(len(part.prompt_targets) for part in slices.values()))
            if budget > 0:
                self._plan(sequence, min(budget, sequence.remaining), slices)
        return StepPlan(list(slices.values()))

    def _queue(self, sequence: Sequence) -> list[Sequence] | None:
        match sequence.state:
            case SequenceState.FOLLOWING:
                return self.following
            case SequenceState.WAITING:
                return self.waiting
            case SequenceState.RESERVING:
                return self.reserving
            case SequenceState.TRANSFERRING:
                return self.transferring
            case SequenceState.RUNNING:
                return self.running
        return None

    def _has_slot(self) -> bool:
        return len(self.running) + len(self.transferring) < self._limits.max_sequences

    def _try_admit(self, sequence: Sequence) -> _Admission:
        """Move the head of a queue on, if nothing is in the way."""
        if sequence.state is SequenceState.WAITING:
            if sum(one.remaining for one in self.running) >= self._limits.max_batched_tokens:
                return _Admission.CAPPED
            fit, admit = self._tables.fit(sequence), self._tables.take
            capped = self._is_lease_capped(sequence, fit)
        else:
            fit, admit = self._tables.fit_handover(sequence), self._tables.reserve
            capped = _exceeds(self._manager.number(BlockState.RESERVED), fit.fresh, self._limits.max_reserved)
        if capped:
            return _Admission.CAPPED
        if self._manager.available_beside(fit.shared) - fit.fresh < self._watermark():
            return _Admission.NO_ROOM
        self.remove(sequence)
        admit(sequence, fit)
        self.enqueue(sequence)
        return _Admission.ADMITTED

    def _is_lease_capped(self, sequence: Sequence, fit: Fit) -> bool:
        if sequence.request.phase is not Phase.CONTEXT_ONLY:
            return False
        newly_leased = fit.fresh + sum(self._manager.state(block) is not BlockState.LEASED for block in fit.shared)
        return _exceeds(self._leases_to_come(), newly_leased, self._limits.max_leased)

    def _leases_to_come(self) -> int:
        """Blocks leased now, and those of running sequences that will be."""
        coming = (len(one.blocks) for one in self.running if one.request.phase is Phase.CONTEXT_ONLY)
        return self._manager.number(BlockState.LEASED) + sum(coming)

    def _watermark(self) -> int:
        return min(len(self.running), math.ceil(self._manager.num_blocks * WATERMARK_SHARE))

    def _plan(self, sequence: Sequence, count: int, slices: dict[int, SequenceSlice]) -> None:
        """Add the next `count` tokens of a sequence to the step, preempting for its blocks where needed."""
        if sequence.state is not SequenceState.RUNNING:
            return
        while not self._tables.grow(sequence, sequence.computed + count):
            youngest = self.running[-1]
            slices.pop(youngest.request_id, None)
            self._preempt(youngest)
            if youngest is sequence:
                return
        slices[sequence.request_id] = _slice(sequence, count)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._tables.release(sequence, SequenceState.WAITING)
        self.enqueue(sequence)
        self.preemptions += 1


def _age(sequence: Sequence) -> int:
    return sequence.request_id


def _exceeds(present: int, more: int, cap: int) -> bool:
    """Whether `more` blocks go over the cap; what is larger than the cap by itself is let in alone."""
    return present > 0 and more > 0 and present + more > cap


def _slice(sequence: Sequence, count: int) -> SequenceSlice:
    start, end = sequence.computed, sequence.computed + count
    sample = end == len(sequence.token_ids)
    return SequenceSlice(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids[start:end],
        start=start,
        blocks=sequence.blocks,
        sample=sample,
        sampling=sequence.request.sampling,
        output_index=sequence.output_tokens,
        forbidden_ids=sequence.forbidden_ids(),
        history=sequence.history,
        constraint=sequence.constraint,
        prompt_targets=sequence.prompt_targets(start, end),
        siblings=[Sibling(one.request_id, one.request.sampling) for one in sequence.followers] if sample else (),
    )
