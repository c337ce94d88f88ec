"""Child of the doctor: what torch says of GPUs. Imports torch and wakes the driver, both of which may fail badly."""

import importlib.util
import itertools

import msgspec
import torch

from twostroke.cli.doctor.child import answer_stream
from twostroke.cli.doctor.facts import Gpu, GpuFacts


def look_at_gpus() -> GpuFacts:
    """All GPUs and which of them reach each other."""
    numbers = range(torch.cuda.device_count())
    unreachable = [pair for pair in itertools.permutations(numbers, 2) if not torch.cuda.can_device_access_peer(*pair)]
    return GpuFacts(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        triton=importlib.util.find_spec("triton") is not None,
        gpus=tuple(map(_gpu, numbers)),
        unreachable=tuple(unreachable),
    )


def _gpu(number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", total, free)


if __name__ == "__main__":
    with answer_stream() as stream:
        stream.write(msgspec.json.encode(look_at_gpus()))
