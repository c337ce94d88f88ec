"""Splits of a decoding token's context: right in number, joined without loss, and none of its batch's business."""

import pytest
import torch

from tests.support.attention_steps import Heads, make_step
from twostroke.engine.attention.contract import AttentionForm, SingleTokens
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.kernels.decode_attention import attend_singles
from twostroke.engine.kernels.splits import MAX_SPLITS, SPLIT_TOKENS, count_splits

SHAPE = Heads(1, 2, 64, 128, torch.float32)


@pytest.mark.parametrize(
    ("visible", "splits"),
    [(0, 1), (1, 1), (SPLIT_TOKENS, 1), (SPLIT_TOKENS + 1, 2), (10**6, MAX_SPLITS)],
)
def test_a_grid_has_room_for_every_split(visible: int, splits: int) -> None:
    """At least one, and no more than are ever joined."""
    assert count_splits(visible) == splits


@pytest.mark.parametrize(
    ("start", "window"),
    [
        (SPLIT_TOKENS - 1, None),
        (SPLIT_TOKENS, None),
        (3 * SPLIT_TOKENS - 1, None),
        (3 * SPLIT_TOKENS + 70, 2 * SPLIT_TOKENS + 1),
        (MAX_SPLITS * SPLIT_TOKENS + 100, None),
    ],
)
def test_contexts_around_the_edges_of_splits(start: int, window: int | None) -> None:
    """The last is so long that splits become longer instead of more."""
    step = make_step(SHAPE, [(start, 1), (5, 1)], AttentionForm(0.3, window), start)
    step.check(step.run(TritonAttention(step.cache, SHAPE.heads)))


def test_a_token_does_not_depend_on_its_batch() -> None:
    """The same bits alone, where one split needs no joining, and beside a long sequence."""
    step = make_step(SHAPE, [(90, 1), (700, 1)], AttentionForm(0.3), 1)
    together = step.run(TritonAttention(step.cache, SHAPE.heads))
    table = torch.tensor(step.plan.slices[0].blocks)
    alone = torch.empty_like(together[:1])
    single = SingleTokens(torch.tensor([0]), torch.tensor([91]))
    attend_singles(alone, step.query[:1], step.cache, 1, table, single, 91, step.form)
    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize("longest", [SPLIT_TOKENS, 2 * SPLIT_TOKENS])
def test_a_padded_row_gives_zeros(longest: int) -> None:
    """A length of 0 reads nothing, whatever its table says; with and without splits."""
    cache = torch.full((1, 1, 2, 2, 128, 64), float("nan"))
    output = torch.full((1, 2, 64), 7.0)
    padded = SingleTokens(torch.tensor([0]), torch.tensor([0]))
    attend_singles(output, torch.ones(1, 2, 64), cache, 1, torch.tensor([10**9]), padded, longest, AttentionForm(0.3))
    assert torch.equal(output, torch.zeros(1, 2, 64))
