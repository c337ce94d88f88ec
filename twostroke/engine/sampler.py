"""Chooses the next token of each sampled slice, all rows at once.

The order of the steps is fixed in `twostroke.protocol.sampling`. A row's result depends on that row alone. Equal logits
are treated alike: `top_k` and `top_p` keep all tokens as likely as the last one kept.

Random choice is Gumbel-max (Gumbel, 1954): the maximum of `logit / temperature + gumbel` is a draw from the softmax.
With 32-bit random words the noise lies in [-3.2, 22.9], so tokens that are further than that below the likeliest
cannot win, and no random number is computed for them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.logit_shaping import is_shaped, shape_logits
from twostroke.engine.philox import random_words
from twostroke.protocol.responses import TokenLogprobs

GumbelMax = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""See `gumbel_max`."""
TokenChooser = Callable[[torch.Tensor, Sequence[SequenceSlice]], torch.Tensor]
"""From logits [rows, vocabulary], which it may change, and a slice a row to tokens, int64 [rows]."""

_WORDS = 2.0**32
_HIGHEST_NOISE = -math.log(-math.log1p(-0.5 / _WORDS))
_LOWEST_NOISE = -math.log(-math.log(0.5 / _WORDS))
_REACH = _HIGHEST_NOISE - _LOWEST_NOISE + 0.01  # the margin covers float32 rounding of the difference
_NUCLEUS = 1024
"""Likeliest tokens that are sorted for `top_p`; a flatter row is sorted whole."""


def draws(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, list[SequenceSlice]]:
    """A row for each token that is to be sampled: slices with siblings need several from the same logits.

    Args:
        logits: [slices, vocabulary].
        slices: Row `i` belongs to `slices[i]`.
    """
    rows = [row for row, part in enumerate(slices) for _ in range(1 + len(part.siblings))]
    drawn = [draw for part in slices for draw in part.draws()]
    return (logits if len(rows) == len(slices) else logits[rows]), drawn


def sample(logits: torch.Tensor, slices: Sequence[SequenceSlice], choose: GumbelMax) -> list[SampledToken]:
    """Choose one token a row with torch, on any device.

    Args:
        logits: [rows, vocabulary]; changed in place.
        slices: Row `i` belongs to `slices[i]`.
        choose: `gumbel_max`, or a faster function with the same results.
    """
    return sample_with(logits, slices, partial(_choose_tokens, choose=choose))


def sample_with(
    logits: torch.Tensor, slices: Sequence[SequenceSlice], choose_tokens: TokenChooser
) -> list[SampledToken]:
    """Step 1, and what comes out; the steps between are those of `choose_tokens`.

    Args:
        logits: [rows, vocabulary]; `choose_tokens` may change them.
        slices: Row `i` belongs to `slices[i]`.
        choose_tokens: Steps 2 to 9.
    """
    if not slices:
        return []
    asked = [row for row, part in enumerate(slices) if part.sampling.logprobs is not None]
    raw = logits[asked].float().log_softmax(dim=-1) if asked else None
    tokens = choose_tokens(logits, slices)
    chosen = tokens.tolist()
    logprobs = {} if raw is None else dict(zip(asked, _logprobs(raw, tokens[asked], slices, asked), strict=True))
    return [SampledToken(part.request_id, chosen[row], logprobs.get(row)) for row, part in enumerate(slices)]


def _choose_tokens(logits: torch.Tensor, slices: Sequence[SequenceSlice], choose: GumbelMax) -> torch.Tensor:
    """Tokens [rows]; `logits` are changed."""
    _forbid(logits, slices)
    tokens = logits.argmax(dim=-1)  # of several maxima the first
    shaped = [row for row, part in enumerate(slices) if part.sampling.greedy and is_shaped(part)]
    if shaped:
        tokens[shaped] = _shape(logits, slices, shaped).argmax(dim=-1)
    drawn = [row for row, part in enumerate(slices) if not part.sampling.greedy]
    if drawn:
        tokens[drawn] = _draw(_shape(logits, slices, drawn), [slices[row] for row in drawn], choose)
    return tokens


def _forbid(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
    for row, part in enumerate(slices):
        if part.forbidden_ids:
            logits[row, list(part.forbidden_ids)] = float("-inf")
        if part.constraint is not None:
            allowed = torch.from_numpy(part.constraint.mask()).to(logits.device)
            logits[row].masked_fill_(~allowed, float("-inf"))


def _shape(logits: torch.Tensor, slices: Sequence[SequenceSlice], rows: list[int]) -> torch.Tensor:
    """Some rows with bias and penalties applied, float32 [rows, vocabulary]; a copy."""
    part = logits[rows].float()
    shape_logits(part, [slices[row] for row in rows])
    return part


def _draw(logits: torch.Tensor, slices: Sequence[SequenceSlice], choose: GumbelMax) -> torch.Tensor:
    """Random tokens [rows] for rows with a temperature; `logits` is float32 [rows, vocabulary] and changed."""
    settings = [part.sampling for part in slices]
    logits /= torch.tensor([params.temperature for params in settings], device=logits.device)[:, None]
    _keep_min_p(logits, [params.min_p for params in settings])
    _keep_top_k(logits, [params.top_k for params in settings])
    _keep_top_p(logits, [params.top_p for params in settings])
    seeds = torch.tensor([params.seed for params in settings], device=logits.device)
    indexes = torch.tensor([part.output_index for part in slices], device=logits.device)
    return choose(logits, seeds, indexes)


def _keep_min_p(logits: torch.Tensor, min_p: Sequence[float]) -> None:
    """Forbid what is less likely than `min_p` times the likeliest token of its row; 0 keeps all."""
    rows = [row for row, p in enumerate(min_p) if p > 0.0]
    if not rows:
        return
    part = logits[rows]
    shares = torch.tensor([min_p[row] for row in rows], device=logits.device)[:, None]
    logits[rows] = part.masked_fill_(part < part.amax(dim=-1, keepdim=True) + shares.log(), float("-inf"))


def _keep_top_k(logits: torch.Tensor, top_k: Sequence[int]) -> None:
    """Forbid all but each row's `top_k` likeliest tokens; 0 keeps all."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < logits.shape[1]]
    if not rows:
        return
    limits = torch.tensor([top_k[row] for row in rows], device=logits.device)
    part = logits[rows]
    likeliest = part.topk(int(limits.max()), dim=-1).values
    least = likeliest.gather(1, limits[:, None] - 1)
    logits[rows] = part.masked_fill_(part < least, float("-inf"))


def _keep_top_p(logits: torch.Tensor, top_p: Sequence[float]) -> None:
    """Forbid all but each row's smallest set of likeliest tokens whose probabilities reach `top_p`; 1 keeps all."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    limits = torch.tensor([top_p[row] for row in rows], device=logits.device)[:, None]
    part = logits[rows]
    probabilities = part.softmax(dim=-1)
    likeliest = probabilities.topk(min(_NUCLEUS, probabilities.shape[1]), dim=-1).values
    least = _least_kept(likeliest, limits)
    flat = (likeliest.sum(dim=-1) < limits[:, 0]).nonzero()[:, 0]
    if len(flat):
        least[flat] = _least_kept(probabilities[flat].sort(dim=-1, descending=True).values, limits[flat])
    logits[rows] = part.masked_fill_(probabilities < least, float("-inf"))


def _least_kept(descending: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The smallest probability [rows, 1] that is kept: those before it sum to less than the limit."""
    before = descending.cumsum(dim=-1) - descending
    kept = (before < limits).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, kept - 1)


def gumbel_max(logits: torch.Tensor, seeds: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """The token with the highest noisy logit in each row, the lowest id of equals; on any device.

    Args:
        logits: float32 [rows, vocabulary]; -inf forbids a token.
        seeds: int64 [rows].
        indexes: int64 [rows]: the output index of the token.

    Returns:
        int64 [rows].
    """
    count, vocabulary = logits.shape
    reachable = logits >= logits.amax(dim=-1, keepdim=True) - _REACH
    rows, tokens = reachable.nonzero(as_tuple=True)
    uniform = (random_words(seeds[rows], indexes[rows], tokens).double() + 0.5) / _WORDS
    noisy = logits[rows, tokens].double() - (-uniform.log()).log()
    best = noisy.new_full((count,), float("-inf")).scatter_reduce_(0, rows, noisy, "amax")
    hits = noisy == best[rows]
    return tokens.new_full((count,), vocabulary).scatter_reduce_(0, rows[hits], tokens[hits], "amin")


def _logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, slices: Sequence[SequenceSlice], asked: Sequence[int]
) -> list[TokenLogprobs]:
    """Logprobs of the rows that asked for them; `raw` is [asked, vocabulary], `chosen` [asked]."""
    of_chosen = raw.gather(1, chosen[:, None])[:, 0].tolist()
    counts = [slices[row].sampling.logprobs or 0 for row in asked]
    top = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(logprob, tuple(row_ids[:count]), tuple(row_values[:count]))
        for logprob, row_ids, row_values, count in zip(of_chosen, ids, values, counts, strict=True)
    ]
