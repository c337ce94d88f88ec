"""Steps 3 to 5 of `twostroke.protocol.sampling`: bias and penalties, of all rows that have them at once.

Only the logits of tokens that are named or were seen are touched, each by itself, so a row depends on itself alone.
"""

from collections.abc import Sequence

import numpy as np
import torch

from twostroke.engine.interfaces import SequenceSlice


def is_shaped(part: SequenceSlice) -> bool:
    """Whether the logits of this slice are changed here."""
    return bool(part.sampling.logit_bias) or part.history is not None


def shape_logits(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
    """Add biases and apply penalties in place.

    Args:
        logits: float32 [rows, vocabulary].
        slices: Row `i` belongs to `slices[i]`.
    """
    _add_bias(logits, slices)
    _apply_penalties(logits, slices)


def _add_bias(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
    biases = [(row, *entry) for row, part in enumerate(slices) for entry in part.sampling.logit_bias]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        index = torch.tensor([rows, tokens], device=logits.device)
        logits[index[0], index[1]] += torch.tensor(values, dtype=torch.float32, device=logits.device)


def _apply_penalties(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
    penalized = [(row, part.sampling, part.history) for row, part in enumerate(slices) if part.history is not None]
    if not penalized:
        return
    sizes = [len(history) for _, _, history in penalized]

    def spread(values: list[float]) -> torch.Tensor:
        """One value a row, repeated for each of the row's tokens."""
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    rows = torch.from_numpy(np.repeat([row for row, _, _ in penalized], sizes)).to(logits.device)
    tokens = torch.from_numpy(np.concatenate([history.token_ids for _, _, history in penalized])).to(logits.device)
    counts = torch.from_numpy(np.concatenate([history.output_counts for _, _, history in penalized])).to(logits.device)
    repetition = spread([sampling.repetition_penalty for _, sampling, _ in penalized])
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([sampling.frequency_penalty for _, sampling, _ in penalized]) * counts
    values -= spread([sampling.presence_penalty for _, sampling, _ in penalized]) * (counts > 0)
    logits[rows, tokens] = values
