"""A real GPU behind the seam; run with `TRITON_INTERPRET=0 pytest -m gpu`."""

import time
from functools import partial

import pytest
import torch

from twostroke.engine.device.choice import choose_device
from twostroke.engine.device.cuda import CudaDevice
from twostroke.protocol.config import DeviceKind

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    """The current GPU."""
    device = choose_device(DeviceKind.CUDA)
    assert isinstance(device, CudaDevice)
    return device


def _scaled(buffer: torch.Tensor, factor: float) -> torch.Tensor:
    return buffer * factor + 1.0


def test_a_replay_reads_what_the_static_buffer_holds_by_then(device: CudaDevice) -> None:
    """Same output tensor, new values; two graphs share their memory."""
    buffer = torch.zeros(1024, device=device.torch_device)
    doubled, halved = (device.capture(partial(_scaled, buffer, by), [buffer]) for by in (2.0, 0.5))
    buffer.fill_(4.0)
    for captured, expected in ((doubled, 9.0), (halved, 3.0), (doubled, 9.0)):
        captured.replay()
        assert bool((captured.output == expected).all())


def test_memory_is_measured(device: CudaDevice) -> None:
    """A step's peak counts what it freed again, and a cache is zero and leaves less for others."""
    peak = device.peak_memory(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device).sum())
    assert 64 * MIB <= peak < 128 * MIB
    before = device.free_memory()
    cache = device.allocate(64 * MIB)
    assert not bool(cache.any())
    assert before - device.free_memory() >= 64 * MIB


def test_an_event_is_reached_when_what_came_before_has_ended(device: CudaDevice) -> None:
    """Not at once behind a long kernel, and then for good."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call] # torch has no types for it
    event = device.event()
    assert not event.reached()
    deadline = time.monotonic() + 30
    while not event.reached() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert event.reached()
