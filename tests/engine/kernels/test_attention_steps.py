"""GPU attention under Triton's interpreter against the reference in float64, over random steps."""

import random

import pytest
import torch

from tests.support.attention_steps import Heads, make_step
from twostroke.engine.attention.contract import AttentionForm
from twostroke.engine.attention.gpu import DTYPES, HEAD_DIMS, TritonAttention
from twostroke.engine.packing import SHORT_SLICE

GROUPS = (1, 2, 3, 4, 7, 8)
BLOCK_SIZES = (8, 16, 32, 24, 128)
CASES = [(head_dim, dtype) for dtype in DTYPES for head_dim in HEAD_DIMS]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_random_steps_agree_with_the_reference(case: int) -> None:
    """Every head size with every dtype, and each group and block size with several of them."""
    head_dim, dtype = CASES[case]
    check_random_step(
        Heads(1 + case % 2, GROUPS[case % len(GROUPS)], head_dim, BLOCK_SIZES[case % len(BLOCK_SIZES)], dtype), case
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1250))
def test_more_random_steps_agree_with_the_reference(seed: int) -> None:
    """All sizes drawn."""
    draw = random.Random(seed)
    check_random_step(
        Heads(
            draw.choice((1, 2, 3)),
            draw.choice((*GROUPS, 16, 32)),
            draw.choice(HEAD_DIMS),
            draw.randint(8, 128),
            draw.choice(DTYPES),
        ),
        seed,
    )


def test_only_what_was_asked_for_is_computed_when_a_step_is_empty() -> None:
    """No tokens, no launch; the output has the right shape all the same."""
    step = make_step(Heads(2, 2, 64, 16, torch.float32), [], AttentionForm(0.1), 0)
    assert step.run(TritonAttention(step.cache, 4)).shape == (0, 4, 64)
    assert step.cache.isnan().all()


@pytest.mark.parametrize("tokens", [1, SHORT_SLICE, SHORT_SLICE + 1])
def test_a_step_of_one_kind_of_slice(tokens: int) -> None:
    """Single tokens without chunks, and chunks without single tokens."""
    check_step(Heads(2, 2, 64, 16, torch.float32), [(31, tokens), (0, tokens)], AttentionForm(0.1), 5)


@pytest.mark.parametrize("group", [5, 32])
def test_heads_that_fill_a_tile_badly_or_wholly(group: int) -> None:
    """Five heads leave rows of a tile unused; of 32, a float32 tile holds one token."""
    check_step(Heads(1, group, 64, 16, torch.float32), [(17, 20), (40, 1)], AttentionForm(0.1), 6)


@pytest.mark.parametrize("window", [1, 31, 33, 64, 1000])
def test_windows_around_the_edges_of_tiles(window: int) -> None:
    """A chunk over a prefix and a decode: the left edge falls into, beside and before every tile."""
    check_step(Heads(1, 4, 64, 16, torch.float32), [(70, 60), (200, 1)], AttentionForm(0.1, window), window)


def check_random_step(shape: Heads, seed: int) -> None:
    """A mixed step, with lengths around the edges of blocks and of tiles."""
    print(f"seed {seed}, {shape}")
    draw = random.Random(seed)
    edges = [shape.block_size * draw.randint(0, max(1, 100 // shape.block_size)) for _ in range(3)] + [0, 64]
    lengths = [
        (max(0, draw.choice(edges) + draw.randint(-1, 1)), draw.choice((1, 1, 2, 9, 33)))
        for _ in range(draw.randint(1, 3))
    ]
    form = AttentionForm(
        shape.head_dim**-0.5,
        window=draw.choice((None, draw.randint(1, 100))),
        softcap=draw.choice((None, 3.0)),
    )
    check_step(shape, lengths, form, seed)


def check_step(shape: Heads, lengths: list[tuple[int, int]], form: AttentionForm, seed: int) -> None:
    """Output close to the reference's, and a cache that equals it bit for bit."""
    print(f"lengths {lengths}, {form}")
    step = make_step(shape, lengths, form, seed)
    output = step.run(TritonAttention(step.cache, shape.heads))
    assert output.dtype == shape.dtype
    step.check(output)
