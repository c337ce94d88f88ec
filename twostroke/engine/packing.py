"""Turns a step plan into the flat arrays that the model and attention read.

Slices are packed into one row of tokens. Those of at most `SHORT_SLICE` tokens (all decodes among them) go first: for
them, attending token by token is cheaper than a matrix product with its gathering of K and V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from twostroke.engine.attention.contract import AttentionBatch, ChunkSpan, SingleTokens
from twostroke.engine.interfaces import SequenceSlice, StepPlan

SHORT_SLICE = 8
"""Slices of up to so many tokens attend token by token (measured on CPU; results agree either way)."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as tensors.

    Attributes:
        token_ids: int64 [1, tokens].
        positions: int64 [1, tokens].
        kept: int64 [kept]: indexes of the tokens whose logits are needed: of each sampled slice the last, then of each
            scored slice the first ones, as many as it has `prompt_targets`.
        sampled: The slices that are sampled, in the plan's order.
        scored: The slices with `prompt_targets`, likewise.
        attention: Where the tokens lie in the cache and what they see.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    sampled: Sequence[SequenceSlice]
    scored: Sequence[SequenceSlice]
    attention: AttentionBatch


def pack(plan: StepPlan, block_size: int) -> PackedStep:
    """Pack `plan` for a cache of `block_size` tokens a block."""
    lengths = [len(part.token_ids) for part in plan.slices]
    order = sorted(
        range(len(lengths)), key=lambda index: lengths[index] > SHORT_SLICE
    )  # stable: keeps the plan's order
    parts = [plan.slices[index] for index in order]
    counts = np.array([lengths[index] for index in order], np.int64)
    starts = np.array([part.start for part in parts], np.int64)
    first_token = np.cumsum(counts) - counts
    table_lengths = np.array([len(part.blocks) for part in parts], np.int64)
    first_block = np.cumsum(table_lengths) - table_lengths
    token_ids = _flatten([part.token_ids for part in parts], int(counts.sum()))
    blocks = _flatten([part.blocks for part in parts], int(table_lengths.sum()))
    positions = np.arange(len(token_ids)) + np.repeat(starts - first_token, counts)
    token_table = np.repeat(first_block, counts)
    slots = blocks[token_table + positions // block_size] * block_size + positions % block_size

    short = int(np.count_nonzero(counts <= SHORT_SLICE))
    singles = int(counts[:short].sum())
    spans = zip(first_token[short:], counts[short:], starts[short:], first_block[short:], strict=True)
    first_of_slice = np.empty(len(parts), np.int64)
    first_of_slice[order] = first_token  # from packed order back to the plan's
    return PackedStep(
        token_ids=torch.from_numpy(token_ids)[None],
        positions=torch.from_numpy(positions)[None],
        kept=torch.from_numpy(_kept(plan.slices, first_of_slice)),
        sampled=[part for part in plan.slices if part.sample],
        scored=[part for part in plan.slices if part.prompt_targets],
        attention=AttentionBatch(
            slots=torch.from_numpy(slots),
            blocks=torch.from_numpy(blocks),
            singles=SingleTokens(
                torch.from_numpy(token_table[:singles].copy()), torch.from_numpy(positions[:singles] + 1)
            ),
            chunks=[ChunkSpan(*map(int, span)) for span in spans],
        ),
    )


def _kept(slices: Sequence[SequenceSlice], first_token: IntArray) -> IntArray:
    """See `PackedStep.kept`; slice `i` begins at index `first_token[i]`."""
    parts = list(zip(slices, first_token.tolist(), strict=True))
    last = [first + len(part.token_ids) - 1 for part, first in parts if part.sample]
    scored = (range(first, first + len(part.prompt_targets)) for part, first in parts)
    return np.array([*last, *chain.from_iterable(scored)], np.int64)


def _flatten(rows: Sequence[Sequence[int]], total: int) -> IntArray:
    return np.fromiter(chain.from_iterable(rows), np.int64, total)
