"""Which device a setting names, and what is no device."""

import importlib.util

import pytest
import torch

from twostroke.engine.device.choice import choose_device
from twostroke.engine.device.cuda import CudaDevice
from twostroke.protocol.config import DeviceKind
from twostroke.protocol.errors import ConfigError


def test_without_a_gpu_only_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` is an error that names the setting, not a fall-back."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in (DeviceKind.AUTO, DeviceKind.CPU):
        assert choose_device(kind) is None
    with pytest.raises(ConfigError, match=r"^device: cuda is set, but torch .* sees no GPU"):
        choose_device(DeviceKind.CUDA)


def test_with_a_gpu_the_current_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the setting says `cpu`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for kind in (DeviceKind.AUTO, DeviceKind.CUDA):
        device = choose_device(kind)
        assert isinstance(device, CudaDevice)
        assert device.torch_device == torch.device("cuda:1")
    assert choose_device(DeviceKind.CPU) is None


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is not taken instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^device: .* install twostroke\[gpu\], or set cpu"):
        choose_device(DeviceKind.AUTO)
