"""The steps of `twostroke.protocol.sampling` written down plainly: one row, one token at a time, no state."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from twostroke.engine.sampler import gumbel_max
from twostroke.protocol.sampling import SamplingParams

Row = npt.NDArray[np.float32]


def reference_token(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> int:
    """The token after `prompt` and `output`, given the raw logits there."""
    row = _penalized(np.array(logits, np.float32), params, prompt, output, eos)
    if params.temperature == 0.0:
        return int(row.argmax())
    row = row / np.float32(params.temperature)
    for keep in (_min_p(row, params), _top_k(row, params)):
        row = np.where(keep & (row > -np.inf), row, np.float32(-np.inf))
    row = np.where(_top_p(row, params), row, np.float32(-np.inf))
    return int(gumbel_max(torch.from_numpy(row)[None], torch.tensor([params.seed]), torch.tensor([len(output)])))


def _penalized(
    row: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> Row:
    row = row.copy()
    for word in params.bad_words:
        before = list(word[:-1])
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        row[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
    for token, bias in params.logit_bias:
        row[token] += np.float32(bias)
    for token in {*prompt, *output}:
        factor = np.float32(params.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= np.float32(params.frequency_penalty) * np.float32(list(output).count(token))
        row[token] -= np.float32(params.presence_penalty)
    return row


def _probabilities(row: Row) -> npt.NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def _min_p(row: Row, params: SamplingParams) -> npt.NDArray[np.bool_]:
    probabilities = _probabilities(row)
    keep: npt.NDArray[np.bool_] = probabilities >= params.min_p * probabilities.max()
    return keep


def _top_k(row: Row, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Of what `min_p` left: that keeps the likeliest tokens, so the k likeliest are the same before and after."""
    k = params.top_k or len(row)
    keep: npt.NDArray[np.bool_] = row >= np.sort(row)[::-1][min(k, len(row)) - 1]
    return keep


def _top_p(row: Row, params: SamplingParams) -> npt.NDArray[np.bool_]:
    probabilities = _probabilities(row)
    ordered = np.sort(probabilities)[::-1]
    kept = int((np.cumsum(ordered) - ordered < params.top_p).sum())
    keep: npt.NDArray[np.bool_] = probabilities >= ordered[kept - 1]
    return keep
