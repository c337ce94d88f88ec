"""Chooses tokens on a GPU: the host's part of the kernels in `twostroke.engine.kernels`.

A step's settings are gathered into a few arrays and uploaded; rows that ask for nothing take no kernel but the last
one. The steps, their order and their results are those of `sampler`; only sums of probabilities (top-p) and logarithms
differ, in their last bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.kernels.draw import draw
from twostroke.engine.kernels.least_kept import Filters, find_least
from twostroke.engine.kernels.shape_logits import add_values, forbid_masked, penalize
from twostroke.engine.sampler import sample_with
from twostroke.protocol.sampling import SamplingParams

_TAIL_MARGIN = 0.01
"""Taken off the logarithm of a tail's mass, for the rounding of sums."""

Array = npt.NDArray[Any]


class TritonSampler:
    """Samples logits on one device.

    Args:
        device: Where the logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> list[SampledToken]:
        """Choose one token a row.

        Args:
            logits: [rows, vocabulary]; changed in place where they are float32.
            slices: Row `i` belongs to `slices[i]`.

        Raises:
            ValueError: The logits are on another device.
        """
        if logits.device.type != self._device.type:
            raise ValueError(f"this sampler was made for logits on {self._device}, not on {logits.device}")
        return sample_with(logits, slices, self._choose_tokens)

    def _choose_tokens(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Steps 2 to 9 of `twostroke.protocol.sampling`."""
        work = logits.float().contiguous()
        self._forbid_masked(work, slices)
        self._add_values(work, slices)
        self._penalize(work, slices)
        settings = [part.sampling for part in slices]
        temperatures = self._upload([params.temperature for params in settings], np.float32)
        seeds = self._upload([params.seed for params in settings], np.int64)
        indexes = self._upload([part.output_index for part in slices], np.int64)
        least = find_least(work, make_filters(settings, work.shape[1], self._device))
        return draw(work, temperatures, least, seeds, indexes)

    def _upload(self, values: Sequence[float] | Array, dtype: npt.DTypeLike) -> torch.Tensor:
        return _upload(values, dtype, self._device)

    def _forbid_masked(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
        masks = [(row, part.constraint.mask()) for row, part in enumerate(slices) if part.constraint is not None]
        if masks:
            rows = self._upload([row for row, _ in masks], np.int64)
            forbid_masked(logits, rows, self._upload(np.stack([mask for _, mask in masks]), np.bool_))

    def _add_values(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
        """Biases, and -inf for forbidden ids, which nothing that is added or penalized can bring back."""
        places: list[int] = []
        values: list[float] = []
        for row, part in enumerate(slices):
            added = dict(part.sampling.logit_bias) | dict.fromkeys(part.forbidden_ids, -math.inf)
            places += [row * logits.shape[1] + token_id for token_id in added]
            values += added.values()
        if places:
            add_values(logits, self._upload(places, np.int64), self._upload(values, np.float32))

    def _penalize(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> None:
        penalized = [(row, part.sampling, part.history) for row, part in enumerate(slices) if part.history is not None]
        if not penalized:
            return
        places = np.concatenate([row * logits.shape[1] + history.token_ids for row, _, history in penalized])
        if not len(places):
            return
        owners = np.repeat(np.arange(len(penalized)), [len(history) for _, _, history in penalized])
        counts = np.concatenate([history.output_counts for _, _, history in penalized])
        penalties = np.array(
            [
                (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
                for _, sampling, _ in penalized
            ]
        )
        penalize(
            logits,
            self._upload(places, np.int64),
            self._upload(owners, np.int32),
            self._upload(counts, np.float32),
            self._upload(penalties, np.float32),
        )


def make_filters(settings: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Filters:
    """The filters of the rows that have one, on `device`; row `i` has `settings[i]`."""
    filtered = [(row, params) for row, params in enumerate(settings) if _is_filtered(params, vocabulary)]
    kept = [params for _, params in filtered]
    tails = [math.log((1.0 - params.top_p) / vocabulary) if params.top_p < 1.0 else -math.inf for params in kept]
    return Filters(
        rows=_upload([row for row, _ in filtered], np.int64, device),
        temperatures=_upload([params.temperature for params in kept], np.float32, device),
        log_min_p=torch.tensor([params.min_p for params in kept]).log().to(device),
        top_k=_upload([params.top_k if params.top_k < vocabulary else 0 for params in kept], np.int64, device),
        top_p=_upload([params.top_p for params in kept], np.float32, device),
        log_tail=_upload([tail - _TAIL_MARGIN for tail in tails], np.float32, device),
    )


def _is_filtered(params: SamplingParams, vocabulary: int) -> bool:
    """Whether a token is chosen from a part of the vocabulary; greedy rows take the likeliest anyway."""
    return not params.greedy and (params.min_p > 0.0 or 0 < params.top_k < vocabulary or params.top_p < 1.0)


def _upload(values: Sequence[float] | Array, dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype)).to(device)
