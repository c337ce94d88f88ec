"""Which GPU a worker computes on, if any."""

import importlib.util

import torch

from twostroke.engine.device.cuda import CudaDevice
from twostroke.protocol.config import DeviceKind
from twostroke.protocol.errors import ConfigError


def choose_device(kind: DeviceKind) -> CudaDevice | None:
    """The GPU that a setting asks for; None for the CPU. `AUTO` takes the current GPU where torch sees one.

    Raises:
        ConfigError: A GPU is asked for, and torch sees none; or there is one, and Triton is missing.
    """
    available = torch.cuda.is_available()
    if kind is DeviceKind.CUDA and not available:
        built = torch.version.cuda or "no CUDA"
        raise ConfigError(
            f"device: cuda is set, but torch {torch.__version__} (built for {built}) sees no GPU; see `twostroke "
            "doctor`, or set cpu"
        )
    if kind is DeviceKind.CPU or not available:
        return None
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device: the GPU's kernels need Triton; install twostroke[gpu], or set cpu")
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))
