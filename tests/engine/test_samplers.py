"""The device chooses the sampler, and nothing else does."""

from functools import partial

import pytest
import torch

from twostroke.engine.sampler import sample
from twostroke.engine.samplers import sampler_for
from twostroke.engine.triton_sampling import TritonSampler
from twostroke.protocol.errors import ConfigError


def test_a_cpu_and_a_gpu_have_samplers_of_their_own() -> None:
    """Making one touches no device."""
    on_cpu = sampler_for(torch.device("cpu"))
    assert isinstance(on_cpu, partial)
    assert on_cpu.func is sample
    assert isinstance(sampler_for(torch.device("cuda:0")), TritonSampler)


def test_other_devices_have_none() -> None:
    """The message names the device."""
    with pytest.raises(ConfigError, match="not on meta"):
        sampler_for(torch.device("meta"))
