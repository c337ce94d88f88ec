"""How tokens are chosen: order of the steps, exactness, and independence of the batch."""

import pytest
import torch

from twostroke.engine.cpu_sampling import CpuGumbelMax
from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.sampler import GumbelMax, gumbel_max, sample
from twostroke.protocol.responses import TokenLogprobs
from twostroke.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["tensor", "compiled"])
def choose(request: pytest.FixtureRequest) -> GumbelMax:
    """Both ways to compute Gumbel-max."""
    return gumbel_max if request.param == "tensor" else CpuGumbelMax()


def test_greedy_takes_the_lowest_of_equal_ids(choose: GumbelMax) -> None:
    """Of several maxima the first wins."""
    assert _ids([[0.0, 2.0, 1.0, 2.0]], [GREEDY], choose) == [1]


def test_forbidden_ids_are_not_chosen_but_keep_their_logprob(choose: GumbelMax) -> None:
    """`min_tokens` changes the choice; logprobs are of the raw distribution."""
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    raw = logits.log_softmax(dim=-1)[0]
    params = SamplingParams(temperature=0.0, logprobs=2)
    (token,) = sample(logits.clone(), [_slice(params, forbidden=(0,))], choose)
    expected = TokenLogprobs(float(raw[2]), (0, 2), (float(raw[0]), float(raw[2])))
    assert token == SampledToken(0, 2, expected)


def test_only_rows_that_asked_have_logprobs(choose: GumbelMax) -> None:
    """A mixed batch: none, the chosen token's alone, and two alternatives."""
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    asked = [SamplingParams(temperature=0.0, logprobs=count) for count in (None, 0, 2)]
    tokens = sample(logits, [_slice(params) for params in asked], choose)
    assert [token.token_id for token in tokens] == [2, 2, 2]
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs is not None
    assert tokens[1].logprobs.top_ids == ()
    assert tokens[2].logprobs is not None
    assert tokens[2].logprobs.top_ids == (2, 1)


def test_top_k_keeps_the_k_likeliest_and_equals(choose: GumbelMax) -> None:
    """With k = 2 and a tie at the second place, three tokens can be drawn, and no other."""
    params = [SamplingParams(temperature=5.0, top_k=2, seed=seed) for seed in range(200)]
    assert set(_ids([[1.0, 0.0, 0.5, 0.5, -1.0]] * 200, params, choose)) == {0, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p(choose: GumbelMax) -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05: p = 0.6 needs two tokens, p = 0.85 three, a tiny p one."""
    logits = [torch.tensor([0.05, 0.5, 0.15, 0.3]).log().tolist()] * 200
    for p, expected in ((0.6, {1, 3}), (0.85, {1, 2, 3}), (1e-6, {1})):
        params = [SamplingParams(top_p=p, seed=seed) for seed in range(200)]
        assert set(_ids(logits, params, choose)) == expected


def test_top_p_of_a_flat_row_counts_all_tokens(choose: GumbelMax) -> None:
    """Where the likeliest 1024 do not reach p, the whole row is sorted: half of 4096 near-equal tokens stay."""
    logits = [(-torch.arange(4096) * 1e-4).tolist()] * 20
    ids = _ids(logits, [SamplingParams(top_p=0.5, seed=seed) for seed in range(20)], choose)
    weights = torch.tensor(logits[0]).softmax(dim=-1).cumsum(dim=-1)
    kept = int((weights < 0.5).sum()) + 1
    assert max(ids) < kept
    assert max(ids) > 1024


def test_draws_follow_the_softmax(choose: GumbelMax) -> None:
    """4000 seeds: each token's share is within four standard errors of its probability at temperature 2."""
    logits = [2.0, 0.0, 1.0, -3.0]
    draws = 4000
    ids = torch.tensor(_ids([logits] * draws, [SamplingParams(temperature=2.0, seed=s) for s in range(draws)], choose))
    expected = (torch.tensor(logits) / 2).softmax(dim=-1)
    shares = torch.bincount(ids, minlength=4) / draws
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all()


def test_a_token_does_not_depend_on_its_batch(choose: GumbelMax) -> None:
    """Rows with different settings give the same tokens alone and together."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 3
    settings = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.3, top_k=7),
        GREEDY,
        SamplingParams(seed=3, top_p=0.4, temperature=1.7),
        SamplingParams(seed=4, top_p=0.9, top_k=50),
        SamplingParams(seed=2**63 - 1, temperature=100.0),
    ]
    slices = [_slice(params, index=row) for row, params in enumerate(settings)]
    together = [token.token_id for token in sample(logits.clone(), slices, choose)]
    alone = [sample(logits[row : row + 1].clone(), slices[row : row + 1], choose)[0].token_id for row in range(6)]
    assert together == alone


def test_seed_and_output_index_key_the_draw(choose: GumbelMax) -> None:
    """The same pair repeats a token; over 20 other seeds or indexes it varies."""
    flat = [[0.0] * 1000] * 20
    params = SamplingParams(seed=5)
    assert len({*_ids(flat, [params] * 20, choose)}) == 1
    assert len({*_ids(flat, [SamplingParams(seed=seed) for seed in range(20)], choose)}) > 15
    slices = [_slice(params, index=index) for index in range(20)]
    assert len({token.token_id for token in sample(torch.tensor(flat), slices, choose)}) > 15


def test_both_ways_draw_the_same_tokens() -> None:
    """Compiled and tensor Gumbel-max agree on sharp, flat and filtered rows of an uneven vocabulary."""
    random = torch.Generator().manual_seed(9)
    logits = torch.randn(40, 3001, generator=random) * torch.logspace(-2, 1.5, 40)[:, None]
    logits[::3, 40:] = float("-inf")
    seeds = torch.randint(0, 2**63 - 1, (40,), generator=random)
    indexes = torch.arange(40) * 1000
    assert torch.equal(CpuGumbelMax()(logits, seeds, indexes), gumbel_max(logits, seeds, indexes))


def _slice(params: SamplingParams, index: int = 0, forbidden: tuple[int, ...] = ()) -> SequenceSlice:
    return SequenceSlice(0, [0], 0, [0], True, params, index, forbidden)


def _ids(logits: list[list[float]], params: list[SamplingParams], choose: GumbelMax) -> list[int]:
    tokens = sample(torch.tensor(logits), [_slice(each) for each in params], choose)
    return [token.token_id for token in tokens]
