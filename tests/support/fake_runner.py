"""An instant stand-in for the model: deterministic tokens, and a cache that shows every misuse of a block.

The cache slot of a position holds `(position, parent tag, own tag)`, where a tag is a hash over the tag before and the
token: as with real K and V, its contents depend on all tokens up to there. Before computing a slice the runner walks
the block table from position 0 and fails unless every slot holds what belongs there; a block that was freed and used
again, shared wrongly, never transferred or transferred to the wrong place cannot pass. The next token is a function of
the last tag and the seed, so it depends on the tokens, their positions and the seed alone. The cache is plain memory: a
KV transfer can move it.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from twostroke.engine.interfaces import (
    CacheMemory,
    ModelFacts,
    PromptScores,
    SampledToken,
    SequenceSlice,
    StepPlan,
    StepResult,
)
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.responses import TokenLogprobs
from twostroke.protocol.transfer import LayoutFingerprint

ROOT_TAG = 1
SLOT_FIELDS = 3


def next_tag(parent: int, token_id: int, position: int) -> int:
    """The tag of `token_id` at `position` after tokens whose last tag is `parent`; 62 bits."""
    digest = hashlib.blake2b(b"%d/%d/%d" % (parent, token_id, position), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def choose_token(tag: int, vocab_size: int, forbidden_ids: Collection[int] = (), seed: int = 0) -> int:
    """The token after the one with `tag`: the first id from `tag + seed` on (cyclic) that is not forbidden."""
    token_id = (tag + seed) % vocab_size
    while token_id in forbidden_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_output(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    ending_ids: Sequence[int] = (),
    min_tokens: int = 0,
    *,
    seed: int = 0,
) -> list[int]:
    """What a sequence must give: `count` output tokens, or fewer if one of `ending_ids` comes."""
    tag = ROOT_TAG
    for position, token_id in enumerate(prompt):
        tag = next_tag(tag, token_id, position)
    output: list[int] = []
    while len(output) < count:
        token_id = choose_token(tag, vocab_size, ending_ids if len(output) < min_tokens else (), seed)
        output.append(token_id)
        if token_id in ending_ids:
            break
        tag = next_tag(tag, token_id, len(prompt) + len(output) - 1)
    return output


@dataclass
class FakeRunner:
    """A `Runner` without a model.

    Attributes:
        num_blocks: KV blocks.
        block_size: Tokens in a block.
        vocab_size: Token ids are below it.
        max_model_len: Prompt and output tokens at most.
        eos_token_ids: Ids that end a sequence.
        plans: Every plan that was run, as it was then.
        error: Raised by the next `run`, if set.
    """

    num_blocks: int = 64
    block_size: int = 4
    vocab_size: int = 1000
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = (0,)
    plans: list[StepPlan] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.slots: npt.NDArray[np.int64] = np.full((self.num_blocks, self.block_size, SLOT_FIELDS), -1, np.int64)
        layout = LayoutFingerprint("fake", "int64", self.block_size, layers=1, kv_heads=1, head_dim=SLOT_FIELDS)
        block_bytes = self.slots[0].nbytes
        self.facts = ModelFacts(self.vocab_size, self.max_model_len, self.eos_token_ids, layout, block_bytes)
        self.cache = CacheMemory(self.slots.ctypes.data, block_bytes, self.num_blocks, self.slots)

    def run(self, plan: StepPlan) -> StepResult:
        """Check the plan and the cache, write the new slots, choose the tokens."""
        if self.error is not None:
            raise self.error
        self.plans.append(StepPlan([msgspec.structs.replace(part, blocks=tuple(part.blocks)) for part in plan.slices]))
        self._check_plan(plan)
        tags = {part.request_id: self._read(part) for part in plan.slices}
        tokens = [token for part in plan.slices for token in self._compute(part, tags[part.request_id])]
        return StepResult(tokens, [self._score(part) for part in plan.slices if part.prompt_targets])

    def copy_blocks_from(self, source: "FakeRunner", source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """What a KV transfer does: write `source_blocks` of another cache into `blocks` of this one."""
        for theirs, ours in zip(source_blocks, blocks, strict=True):
            self.slots[ours] = source.slots[theirs]

    def _check_plan(self, plan: StepPlan) -> None:
        """No sequence twice, decodes first, tables cover what is computed, and no slot is written twice in a step."""
        assert plan.slices
        ids = [part.request_id for part in plan.slices]
        assert len(ids) == len(set(ids)), f"request ids {ids} repeat"
        assert all(part.token_ids for part in plan.slices)
        chunks = [len(part.token_ids) > 1 or not part.sample for part in plan.slices]
        assert chunks == sorted(chunks), f"sequences that decode must come before chunks: {chunks}"
        written: set[tuple[int, int]] = set()
        for part in plan.slices:
            end = part.start + len(part.token_ids)
            assert end <= self.max_model_len
            assert len(part.blocks) * self.block_size >= end, f"{part.request_id}: {end} positions, {part.blocks}"
            assert len(set(part.blocks)) == len(part.blocks), f"{part.request_id}: {part.blocks} repeat"
            assert part.forbidden_ids == tuple(sorted(part.forbidden_ids))
            slots = {self._slot(part, position) for position in range(part.start, end)}
            assert not slots & written, f"{part.request_id} writes slots that another slice writes: {slots & written}"
            written |= slots

    @staticmethod
    def _score(part: SequenceSlice) -> PromptScores:
        """The token at position `p` has logprob `-p` and rank `p`; the likeliest one there is `p` with logprob 0."""
        assert len(part.prompt_targets) in {len(part.token_ids), len(part.token_ids) - 1}
        assert list(part.prompt_targets[: len(part.token_ids) - 1]) == list(part.token_ids[1:])
        positions = range(part.start + 1, part.start + 1 + len(part.prompt_targets))
        rows = [[0.0][: part.sampling.prompt_logprobs] for _ in positions]
        ids = [[position][: part.sampling.prompt_logprobs] for position in positions]
        scores = PromptLogprobs.pack((-position for position in positions), positions, ids, rows)
        return PromptScores(part.request_id, part.start, scores)

    def _slot(self, part: SequenceSlice, position: int) -> tuple[int, int]:
        return part.blocks[position // self.block_size], position % self.block_size

    def _read(self, part: SequenceSlice) -> int:
        """Check all slots before the slice; returns the last one's tag."""
        tag = ROOT_TAG
        for position in range(part.start):
            found = self.slots[self._slot(part, position)].tolist()
            assert found[:2] == [position, tag], (
                f"request id {part.request_id}, position {position}: slot {self._slot(part, position)} holds {found}"
            )
            tag = found[2]
        return tag

    def _compute(self, part: SequenceSlice, tag: int) -> list[SampledToken]:
        for position, token_id in enumerate(part.token_ids, part.start):
            parent, tag = tag, next_tag(tag, token_id, position)
            self.slots[self._slot(part, position)] = (position, parent, tag)
        assert part.sample or not part.siblings
        return [self.choose(draw, tag) for draw in part.draws()] if part.sample else []

    def choose(self, part: SequenceSlice, tag: int) -> SampledToken:
        """The next token after the last one, which has `tag`."""
        forbidden: set[int] = set(part.forbidden_ids)
        if part.constraint is not None:
            forbidden.update(np.flatnonzero(~part.constraint.mask()).tolist())
        token_id = choose_token(tag, self.vocab_size, forbidden, part.sampling.seed)
        logprobs = TokenLogprobs(-0.5, (token_id,), (-0.5,)) if part.sampling.logprobs is not None else None
        return SampledToken(part.request_id, token_id, logprobs)
