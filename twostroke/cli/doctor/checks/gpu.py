"""What torch's view of GPUs means for serving."""

from twostroke.cli.doctor.facts import Gpu, GpuFacts, HostFacts, ProbeFault
from twostroke.cli.doctor.finding import Finding, Status
from twostroke.cli.doctor.units import gib

DEVICES = "gpu.devices"
PEER_ACCESS = "gpu.peer_access"


def check_gpus(facts: GpuFacts | ProbeFault, host: HostFacts) -> list[Finding]:
    """Which GPUs there are, and whether they reach each other."""
    if isinstance(facts, ProbeFault):
        todo = "see whether `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'` work; the engine needs torch"
        return [Finding(DEVICES, Status.PROBLEM, f"the process that asked torch for GPUs {facts.what}", todo)]
    if facts.gpus:
        found = "; ".join(f"{number}: {_describe(gpu)}" for number, gpu in enumerate(facts.gpus))
        return [
            Finding(DEVICES, Status.OK, f"{found} (torch {facts.torch}, CUDA {facts.cuda})"),
            *_check_peer_access(facts),
        ]
    if host.nvidia_devices and facts.cuda is None:
        found = f"{host.nvidia_devices} NVIDIA device files, but torch {facts.torch} is built for CPUs"
        return [Finding(DEVICES, Status.WARNING, found, "install a CUDA build of torch that fits the driver")]
    if host.nvidia_devices:
        found = f"{host.nvidia_devices} NVIDIA device files, but torch {facts.torch} (CUDA {facts.cuda}) sees no GPU"
        todo = "look at CUDA_VISIBLE_DEVICES, at the driver's version and at the container's GPU settings"
        return [Finding(DEVICES, Status.WARNING, found, todo)]
    return [Finding(DEVICES, Status.NOTE, f"none; the engine runs on the CPU (torch {facts.torch})")]


def _describe(gpu: Gpu) -> str:
    return f"{gpu.name}, sm_{gpu.capability.replace('.', '')}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"


def _check_peer_access(facts: GpuFacts) -> list[Finding]:
    if len(facts.gpus) == 1:
        return []
    if not facts.unreachable:
        return [Finding(PEER_ACCESS, Status.OK, f"each of {len(facts.gpus)} GPUs reaches every other")]
    pairs = ", ".join(f"{source} to {target}" for source, target in facts.unreachable)
    todo = (
        "KV blocks between these go through host memory: place roles that exchange many on GPUs that reach each other "
        "(`nvidia-smi topo -p2p rw`); inside a virtual machine, ask for PCIe access control to be off"
    )
    return [Finding(PEER_ACCESS, Status.WARNING, f"no direct access from {pairs}", todo)]
