"""Steps 2 to 5 of `twostroke.protocol.sampling` on the GPU: masks, biases and penalties, in place.

`logits` is float32 [rows, vocabulary], contiguous, in all of them; offsets are 64 bits wide. Fused multiply-add is off,
so that every logit has the bits that `logit_shaping` gives it on the CPU.

    forbid_masked   reads 1 byte for each token of a masked row, writes 4 for each forbidden one
    add_values      16 bytes read, 4 written for each entry (12 of it the entry's place and value)
    penalize        24 bytes read, 4 written for each entry, and 12 for each penalized row
"""

import torch
import triton
import triton.language as tl

_TILE = 1024
_ENTRIES = 256
_WARPS = 4


@triton.jit
def _forbid_masked(
    logits: tl.tensor, rows: tl.tensor, allowed: tl.tensor, vocabulary: tl.tensor, tile: tl.constexpr
) -> None:
    """Program (i, j): tile j of mask i, which is for row `rows[i]`."""
    mask = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    kept = tl.load(allowed + mask * vocabulary + token, mask=token < vocabulary, other=1)
    row = tl.load(rows + mask)
    tl.store(logits + row * vocabulary + token, float("-inf"), mask=kept == 0)


def forbid_masked(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Forbid what the masks do not allow.

    Args:
        logits: float32 [rows, vocabulary].
        rows: int64 [masks]: the row of each mask.
        allowed: bool [masks, vocabulary].
    """
    masks, vocabulary = allowed.shape
    grid = (masks, triton.cdiv(vocabulary, _TILE))
    _forbid_masked[grid](logits, rows, allowed.view(torch.uint8), vocabulary, tile=_TILE, num_warps=_WARPS)


@triton.jit(do_not_specialize=["count"])
def _add_values(logits: tl.tensor, places: tl.tensor, values: tl.tensor, count: tl.tensor, tile: tl.constexpr) -> None:
    """Program i: entries from `i * tile` on."""
    entry = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = entry < count
    place = tl.load(places + entry, mask=inside, other=0)
    value = tl.load(values + entry, mask=inside, other=0.0)
    logit = tl.load(logits + place, mask=inside, other=0.0)
    tl.store(logits + place, logit + value, mask=inside)


def add_values(logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Add a value to single logits; -inf forbids one.

    Args:
        logits: float32 [rows, vocabulary].
        places: int64 [entries]: `row * vocabulary + token`, distinct.
        values: float32 [entries].
    """
    count = len(places)
    _add_values[triton.cdiv(count, _ENTRIES),](logits, places, values, count, tile=_ENTRIES, num_warps=_WARPS)


@triton.jit(do_not_specialize=["count"])
def _penalize(
    logits: tl.tensor,
    places: tl.tensor,
    owners: tl.tensor,
    counts: tl.tensor,
    penalties: tl.tensor,
    count: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Program i: entries from `i * tile` on."""
    entry = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = entry < count
    place = tl.load(places + entry, mask=inside, other=0)
    penalty = penalties + tl.load(owners + entry, mask=inside, other=0) * 3
    repetition = tl.load(penalty)
    frequency = tl.load(penalty + 1)
    presence = tl.load(penalty + 2)
    times = tl.load(counts + entry, mask=inside, other=0.0)
    logit = tl.load(logits + place, mask=inside, other=0.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit -= frequency * times
    logit -= tl.where(times > 0, presence, 0.0)
    tl.store(logits + place, logit, mask=inside)


def penalize(
    logits: torch.Tensor, places: torch.Tensor, owners: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> None:
    """Apply repetition, frequency and presence penalty to the tokens that sequences hold.

    Args:
        logits: float32 [rows, vocabulary].
        places: int64 [entries]: `row * vocabulary + token`, distinct.
        owners: int32 [entries]: which line of `penalties` an entry's sequence has.
        counts: float32 [entries]: how often the output holds the token.
        penalties: float32 [sequences, 3]: repetition, frequency, presence.
    """
    count = len(places)
    _penalize[triton.cdiv(count, _ENTRIES),](
        logits, places, owners, counts, penalties, count, tile=_ENTRIES, num_warps=_WARPS, enable_fp_fusion=False
    )
