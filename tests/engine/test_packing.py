"""From step plans to flat arrays."""

import msgspec

from twostroke.engine.attention.contract import ChunkSpan
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.packing import pack
from twostroke.protocol.sampling import SamplingParams


def test_short_slices_go_first_and_results_keep_the_plans_order() -> None:
    """A decode, a long chunk, a short chunk: the short one's tokens attend by themselves, before the long one."""
    plan = StepPlan(
        [
            _slice([7], start=5, blocks=[9, 3], sample=True),
            _slice(list(range(20, 32)), start=4, blocks=[0, 1, 2, 4], sample=True),
            _slice([8, 9], start=0, blocks=[6], sample=False),
        ]
    )
    step = pack(plan, block_size=4)
    assert step.token_ids.tolist() == [[7, 8, 9, *range(20, 32)]]
    assert step.positions.tolist() == [[5, 0, 1, *range(4, 16)]]
    assert step.attention.slots.tolist() == [13, 24, 25, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19]
    assert step.attention.blocks.tolist() == [9, 3, 6, 0, 1, 2, 4]
    assert step.attention.singles.first_block.tolist() == [0, 2, 2]
    assert step.attention.singles.lengths.tolist() == [6, 1, 2]
    assert step.attention.chunks == [ChunkSpan(first_token=3, tokens=12, start=4, first_block=3)]
    assert step.kept.tolist() == [0, 14]
    assert step.sampled == [plan.slices[0], plan.slices[1]]
    assert step.scored == []


def test_scored_tokens_come_after_the_sampled_ones() -> None:
    """Of two chunks with targets, the first is packed last, but its rows of logits come first."""
    scored = [
        msgspec.structs.replace(
            _slice(list(range(20, 32)), start=0, blocks=[0, 1, 2], sample=True), prompt_targets=range(21, 32)
        ),
        msgspec.structs.replace(_slice([8, 9], start=4, blocks=[6, 7], sample=False), prompt_targets=[9, 10]),
    ]
    step = pack(StepPlan([_slice([7], start=5, blocks=[9, 3], sample=True), *scored]), block_size=4)
    assert step.kept.tolist() == [0, 14, *range(3, 14), 1, 2]
    assert step.scored == scored


def _slice(token_ids: list[int], *, start: int, blocks: list[int], sample: bool) -> SequenceSlice:
    return SequenceSlice(0, token_ids, start, blocks, sample, SamplingParams(), 0)
