"""Which sampler a device has; no other one is ever taken instead."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.sampler import sample
from twostroke.protocol.errors import ConfigError

Sampler = Callable[[torch.Tensor, Sequence[SequenceSlice]], list[SampledToken]]
"""From logits [rows, vocabulary], which it may change, and a slice a row to a token a row."""


def sampler_for(device: torch.device) -> Sampler:
    """The sampler of logits on `device`.

    Raises:
        ConfigError: There is none for it.
    """
    if device.type == "cpu":
        from twostroke.engine.cpu_sampling import CpuGumbelMax  # noqa: PLC0415 - a GPU's worker compiles nothing for CPUs

        return partial(sample, choose=CpuGumbelMax())
    if device.type == "cuda":
        from twostroke.engine.triton_sampling import TritonSampler  # noqa: PLC0415 - triton is only there beside a GPU

        return TritonSampler(device)
    raise ConfigError(f"device: tokens are sampled on cpu and cuda, not on {device}")
