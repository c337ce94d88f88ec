"""Chooses the next token of each sampled slice, all rows at once."""

from collections.abc import Sequence

import torch

from twostroke.engine.interfaces import SampledToken, SequenceSlice


def sample(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[SampledToken]:
    """Choose one token a row of `logits` [rows, vocabulary]; row `i` belongs to `slices[i]`."""
    tokens = logits.argmax(dim=-1).tolist()
    return [SampledToken(part.request_id, token, None) for part, token in zip(slices, tokens, strict=True)]
