"""Logprobs of prompt tokens, for requests with `prompt_logprobs`."""

from collections.abc import Sequence

import torch

from twostroke.engine.interfaces import PromptScores, SequenceSlice
from twostroke.protocol.prompt_logprobs import PromptLogprobs


def score_prompts(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[PromptScores]:
    """The logprobs of each slice's `prompt_targets`.

    Args:
        logits: [targets of all slices in order, vocabulary].
        slices: Slices that have targets.
    """
    if not slices:
        return []
    targets = torch.tensor([token for part in slices for token in part.prompt_targets], device=logits.device)
    raw = logits.float().log_softmax(dim=-1)
    chosen = raw.gather(1, targets[:, None])
    ranks = (raw > chosen).sum(dim=-1) + 1
    counts = [part.sampling.prompt_logprobs or 0 for part in slices]
    top = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
    scores, first = [], 0
    for part, count in zip(slices, counts, strict=True):
        rows = slice(first, first + len(part.prompt_targets))
        first = rows.stop
        packed = PromptLogprobs.pack(
            chosen[rows, 0].tolist(),
            ranks[rows].tolist(),
            top.indices[rows, :count].tolist(),
            top.values[rows, :count].tolist(),
        )
        scores.append(PromptScores(part.request_id, part.start, packed))
    return scores
