"""Step 9 of `twostroke.protocol.sampling` on the GPU: Gumbel-max, or the plain maximum where temperature is 0.

Programs share a row: each takes a span of it and keeps its best noisy logit and that one's token; a second kernel takes
the best of them. A maximum does not depend on the order, so neither does a token on how many programs shared its row.

Noise is computed in float64, as on the CPU, but only for tiles in which a token could win: noise is below 23, so most
tiles need no random words, and the noise of a word is at most -ln(-ln u) <= -ln(1 - u), which float32 bounds well.

Reads 4 bytes of each logit once; writes and reads 16 bytes a program.
"""

import torch
import triton
import triton.language as tl

from twostroke.engine.kernels.random_word import random_word

_TILE = 1024
_WARPS = 4
_PROGRAMS = 512
"""About so many programs keep a large GPU busy."""


@triton.jit
def _noisy(scaled: tl.tensor, word: tl.tensor) -> tl.tensor:
    """The logit plus the Gumbel noise of its random word, float64."""
    uniform = (word.to(tl.float64) + 0.5) / 4294967296.0
    return scaled.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit
def _highest_noisy(scaled: tl.tensor, word: tl.tensor) -> tl.tensor:
    """No noisy logit of the tile is above this: see the module; 0.001 covers the rounding of the logarithm."""
    below_top = (4294967295 - word.to(tl.int64)).to(tl.float32) + 0.5
    return tl.max(scaled.to(tl.float64) + (22.18171 - tl.log(below_top)).to(tl.float64)) + 0.001


@triton.jit
def _draw_spans(
    logits: tl.tensor,
    temperatures: tl.tensor,
    least: tl.tensor,
    seeds: tl.tensor,
    indexes: tl.tensor,
    best_logits: tl.tensor,
    best_tokens: tl.tensor,
    vocabulary: tl.tensor,
    span: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Program (i, j): tokens `j * span .. (j + 1) * span` of row i."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits += row * vocabulary
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    lowest_kept = tl.load(least + row)
    seed = tl.load(seeds + row)
    index = tl.load(indexes + row)
    best = tl.full((), float("-inf"), tl.float64)
    chosen = tl.full((), 0, tl.int64)
    for start in range(part * span, tl.minimum((part + 1) * span, vocabulary), tile):
        token = start + tl.arange(0, tile)
        scaled = tl.div_rn(tl.load(logits + token, mask=token < vocabulary, other=float("-inf")), divisor)
        scaled = tl.where(scaled >= lowest_kept, scaled, float("-inf"))
        noisy = scaled.to(tl.float64)
        if not greedy:
            noisy = tl.full((tile,), float("-inf"), tl.float64)
            if tl.max(scaled) + 23.0 > best:
                word = random_word(seed, index, token)
                if _highest_noisy(scaled, word) > best:
                    noisy = _noisy(scaled, word)
        top = tl.max(noisy)
        if top > best:
            best = top
            chosen = tl.min(tl.where(noisy == top, token, vocabulary)).to(tl.int64)
    place = row * tl.num_programs(1) + part
    tl.store(best_logits + place, best)
    tl.store(best_tokens + place, chosen)


@triton.jit(do_not_specialize=["spans"])
def _best_of_spans(
    best_logits: tl.tensor, best_tokens: tl.tensor, tokens: tl.tensor, spans: tl.tensor, width: tl.constexpr
) -> None:
    """Program i: the token of row i, the lowest of equals; `width` is a power of two, at least `spans`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, width)
    inside = part < spans
    logit = tl.load(best_logits + row * spans + part, mask=inside, other=float("-inf"))
    token = tl.load(best_tokens + row * spans + part, mask=inside, other=0)
    tied = inside & (logit == tl.max(logit))
    tl.store(tokens + row, tl.min(tl.where(tied, token, 9223372036854775807)))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, least: torch.Tensor, seeds: torch.Tensor, indexes: torch.Tensor
) -> torch.Tensor:
    """A token for each row, int64 [rows]; token 0 where all are forbidden.

    Args:
        logits: float32 [rows, vocabulary], contiguous; -inf forbids. Not changed.
        temperatures: float32 [rows]; 0 takes the likeliest token.
        least: float32 [rows]: smallest logit over temperature that is kept.
        seeds: int64 [rows], not negative.
        indexes: int64 [rows]: the output index of the token.
    """
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, _TILE)
    span = triton.cdiv(tiles, max(1, min(tiles, _PROGRAMS // rows))) * _TILE
    spans = triton.cdiv(vocabulary, span)
    best_logits = torch.empty((rows, spans), dtype=torch.float64, device=logits.device)
    best_tokens = torch.empty((rows, spans), dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw_spans[rows, spans](
        logits,
        temperatures,
        least,
        seeds,
        indexes,
        best_logits,
        best_tokens,
        vocabulary,
        span,
        tile=_TILE,
        num_warps=_WARPS,
    )
    width = triton.next_power_of_2(min(tiles, _PROGRAMS))  # whatever the rows: other constants are compiled anew
    _best_of_spans[rows,](best_logits, best_tokens, tokens, spans, width=width, num_warps=_WARPS)
    return tokens
