"""Steps 7 and 8 of `twostroke.protocol.sampling` on the GPU: the smallest logit that min-p, top-k and top-p keep.

No row is sorted. All three keep what is at least some value, so equal logits are treated alike. Min-p names its value;
the other two are found by one search, which ends at exactly one of the row's logits:

    top-k: the smallest value above which there are less than k logits
    top-p: the smallest value above which there is less than p of the mass

Floats of one sign are ordered as their bits are, so an interval of floats can be cut into 16 parts again and again: at
most 9 passes. They read a short list, which holds the logits from a bound on that cannot exclude the value sought:

    top-k: the k-th largest of the lanes' maxima (a row is dealt out to 1024 lanes): at least k logits reach it
    top-p: the logit of the share (1 - p) / vocabulary: all tokens below it together hold less than 1 - p of the mass

So there are three kernels: maxima of the lanes, list, search. Sums run in an order that the vocabulary alone decides: a
row does not depend on its batch. For each filtered row they read its logits (4 bytes each) twice, or three times where
top-p without top-k needs the whole mass, and write the list once and read it some 9 times, mostly from the L2 cache.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 4096
_LANES = 1024
_WAYS = 16
_WARPS = 8


@dataclass(frozen=True, slots=True)
class Filters:
    """What the rows that have a filter keep, one entry for each.

    Attributes:
        rows: int64: the row of the logits.
        temperatures: float32, above 0.
        log_min_p: float32: logarithm of min-p; -inf keeps all.
        top_k: int64: 0 keeps all.
        top_p: float32: 1 keeps all.
        log_tail: float32: logarithm of `(1 - top_p) / vocabulary`, rounded down; -inf where top-p keeps all.
    """

    rows: torch.Tensor
    temperatures: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_tail: torch.Tensor


@triton.jit
def _key(value: tl.tensor) -> tl.tensor:
    """An integer with the order of the float32 value, as int64."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float32 value of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    values: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    highest: tl.tensor,
    limit: tl.tensor,
    weighted: tl.constexpr,
    ways: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """The smallest value, from `bound` to `highest`, above which the values' weights sum to less than `limit`.

    Args:
        values: float32 [count].
        count: How many.
        bound: Where the search begins; the result if less than `limit` lies above it.
        highest: The largest of the values; below `bound` only if all are -inf.
        limit: Above 0.
        weighted: Weigh a value by `exp(value - highest)`; else by 1.
        ways: Parts into which a pass cuts the interval.
        tile: Values that are read at once.
    """
    way = tl.arange(0, ways)
    low, high = _key(bound), _key(highest)
    while low < high:
        step = (high - low) // ways + 1
        ends = _value(tl.minimum(low + (way + 1) * step - 1, high))
        sums = tl.zeros((ways,), tl.float32)
        for start in range(0, count, tile):
            at = start + tl.arange(0, tile)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            weight = tl.exp(value - highest) if weighted else tl.full((tile,), 1.0, tl.float32)
            sums += tl.sum(tl.where(value[None, :] > ends[:, None], weight[None, :], 0.0), axis=1)
        part = tl.min(tl.where(sums < limit, way, ways - 1))
        high = tl.minimum(low + (part + 1) * step - 1, high)
        low += part * step
    return _value(tl.maximum(low, high))  # nothing was searched where every token is forbidden: `highest` is -inf


@triton.jit
def _scaled(
    logits: tl.tensor, start: tl.tensor, count: tl.tensor, temperature: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Logits `start .. start + tile` over the temperature; -inf beyond `count`."""
    at = start + tl.arange(0, tile)
    return tl.div_rn(tl.load(logits + at, mask=at < count, other=float("-inf")), temperature)


@triton.jit
def _find_maxima(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    vocabulary: tl.tensor,
    lanes: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Program i: the lanes' maxima of the row of filter i."""
    index = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + index) * vocabulary
    temperature = tl.load(temperatures + index)
    highest = tl.full((tile,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, tile):
        highest = tl.maximum(highest, _scaled(logits, start, vocabulary, temperature, tile))
    of_lanes = tl.max(tl.reshape(highest, (tile // lanes, lanes)), axis=0)
    tl.store(maxima + index * lanes + tl.arange(0, lanes), of_lanes)


@triton.jit
def _list_candidates(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    log_min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_tail: tl.tensor,
    maxima: tl.tensor,
    candidates: tl.tensor,
    counts: tl.tensor,
    limits: tl.tensor,
    vocabulary: tl.tensor,
    lanes: tl.constexpr,
    ways: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Program i, for filter i: the candidates, how many, and (bound, maximum, mass of all) in `limits`."""
    lowest_finite: tl.constexpr = -3.4028234663852886e38
    index = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + index) * vocabulary
    candidates += index * vocabulary
    maxima += index * lanes
    temperature = tl.load(temperatures + index)
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    highest = tl.max(tl.load(maxima + tl.arange(0, lanes)))
    bound = tl.maximum(highest + tl.load(log_min_p + index), lowest_finite)
    mass = tl.zeros((tile,), tl.float32)
    if k > 0:
        bound = _search(maxima, lanes, bound, highest, k.to(tl.float32), False, ways, lanes)
    elif p < 1.0:
        for start in range(0, vocabulary, tile):
            scaled = _scaled(logits, start, vocabulary, temperature, tile)
            mass += tl.where(scaled >= bound, tl.exp(scaled - highest), 0.0)
        bound = tl.maximum(bound, highest + tl.load(log_tail + index) + tl.log(tl.sum(mass)))
    count = 0
    if (k > 0) | (p < 1.0):
        for start in range(0, vocabulary, tile):
            scaled = _scaled(logits, start, vocabulary, temperature, tile)
            taken = (scaled >= bound).to(tl.int32)
            tl.store(candidates + count + tl.cumsum(taken) - 1, scaled, mask=taken == 1)
            count += tl.sum(taken)
    tl.store(counts + index, count)
    tl.store(limits + index * 3, bound)
    tl.store(limits + index * 3 + 1, highest)
    tl.store(limits + index * 3 + 2, tl.sum(mass))


@triton.jit
def _mass_from(
    candidates: tl.tensor, count: tl.tensor, least: tl.tensor, highest: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Sum of `exp(candidate - highest)` over the candidates that are at least `least`."""
    mass = tl.zeros((tile,), tl.float32)
    for start in range(0, count, tile):
        at = start + tl.arange(0, tile)
        value = tl.load(candidates + at, mask=at < count, other=float("-inf"))
        mass += tl.where(value >= least, tl.exp(value - highest), 0.0)
    return tl.sum(mass)


@triton.jit
def _find_least(
    rows: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    candidates: tl.tensor,
    counts: tl.tensor,
    limits: tl.tensor,
    least: tl.tensor,
    vocabulary: tl.tensor,
    ways: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Program i: searches the candidates of filter i, and stores the value for its row."""
    index = tl.program_id(0).to(tl.int64)
    candidates += index * vocabulary
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    count = tl.load(counts + index)
    bound = tl.load(limits + index * 3)
    highest = tl.load(limits + index * 3 + 1)
    mass = tl.load(limits + index * 3 + 2)
    if k > 0:
        bound = _search(candidates, count, bound, highest, k.to(tl.float32), False, ways, tile)
        mass = _mass_from(candidates, count, bound, highest, tile)
    if p < 1.0:
        bound = _search(candidates, count, bound, highest, p * mass, True, ways, tile)
    tl.store(least + tl.load(rows + index), bound)


def find_least(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The smallest logit over temperature that is kept, float32 [rows]; -inf for rows without a filter.

    Args:
        logits: float32 [rows, vocabulary], contiguous; not changed.
        filters: On the same device.
    """
    rows, vocabulary = logits.shape
    filtered = len(filters.rows)
    least = logits.new_full((rows,), float("-inf"))
    if not filtered:
        return least
    tile = min(_TILE, triton.next_power_of_2(vocabulary))
    lanes = min(_LANES, tile)
    maxima = logits.new_empty((filtered, lanes))
    candidates = logits.new_empty((filtered, vocabulary))
    counts = torch.empty(filtered, dtype=torch.int32, device=logits.device)
    limits = logits.new_empty((filtered, 3))
    grid = (filtered,)
    _find_maxima[grid](
        logits, filters.rows, filters.temperatures, maxima, vocabulary, lanes=lanes, tile=tile, num_warps=_WARPS
    )
    _list_candidates[grid](
        logits,
        filters.rows,
        filters.temperatures,
        filters.log_min_p,
        filters.top_k,
        filters.top_p,
        filters.log_tail,
        maxima,
        candidates,
        counts,
        limits,
        vocabulary,
        lanes=lanes,
        ways=_WAYS,
        tile=tile,
        num_warps=_WARPS,
    )
    _find_least[grid](
        filters.rows,
        filters.top_k,
        filters.top_p,
        candidates,
        counts,
        limits,
        least,
        vocabulary,
        ways=_WAYS,
        tile=lanes,
        num_warps=_WARPS,
    )
    return least
