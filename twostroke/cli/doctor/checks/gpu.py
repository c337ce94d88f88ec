"""What torch's view of GPUs means for serving."""

from twostroke.cli.doctor.facts import Gpu, GpuFacts, HostFacts, ProbeFault
from twostroke.cli.doctor.finding import Finding, Status
from twostroke.cli.doctor.units import gib
from twostroke.protocol.config import ClusterConfig, DeviceKind

DEVICES = "gpu.devices"
KERNELS = "gpu.kernels"
PEER_ACCESS = "gpu.peer_access"


def on_gpu(config: ClusterConfig) -> bool:
    """Whether a role may compute on a GPU."""
    return any(engine.device is not DeviceKind.CPU for engine in (config.context, config.generation))


def check_gpus(facts: GpuFacts | ProbeFault, host: HostFacts, config: ClusterConfig) -> list[Finding]:
    """Which GPUs there are, whether the engine can use them, and whether they reach each other."""
    if isinstance(facts, ProbeFault):
        todo = "see whether `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'` work; the engine needs torch"
        return [Finding(DEVICES, Status.PROBLEM, f"the process that asked torch for GPUs {facts.what}", todo)]
    if not facts.gpus:
        return [_check_absence(facts, host, config)]
    found = "; ".join(f"{number}: {_describe(gpu)}" for number, gpu in enumerate(facts.gpus))
    findings = [Finding(DEVICES, Status.OK, f"{found} (torch {facts.torch}, CUDA {facts.cuda})")]
    if not on_gpu(config):
        return [*findings, Finding(KERNELS, Status.NOTE, "not used: both roles have device: cpu")]
    return [*findings, _check_kernels(facts), *_check_peer_access(facts)]


def _check_absence(facts: GpuFacts, host: HostFacts, config: ClusterConfig) -> Finding:
    built = "for CPUs" if facts.cuda is None else f"for CUDA {facts.cuda}"
    asked = any(engine.device is DeviceKind.CUDA for engine in (config.context, config.generation))
    if not host.nvidia_devices and not asked:
        return Finding(DEVICES, Status.NOTE, f"none; the engine runs on the CPU (torch {facts.torch})")
    found = f"{host.nvidia_devices} NVIDIA device files, but torch {facts.torch}, built {built}, sees no GPU"
    todo = "look at CUDA_VISIBLE_DEVICES, at the driver's version and at the container's GPU settings"
    if facts.cuda is None:
        todo = "install a CUDA build of torch that fits the driver"
    if asked:
        return Finding(DEVICES, Status.PROBLEM, f"{found}, and a role has device: cuda", f"{todo}; or set device: cpu")
    return Finding(DEVICES, Status.WARNING, f"{found}: the engine runs on the CPU", todo)


def _check_kernels(facts: GpuFacts) -> Finding:
    if facts.triton:
        return Finding(KERNELS, Status.OK, "Triton is there")
    return Finding(KERNELS, Status.PROBLEM, "Triton is missing", "install twostroke[gpu], or set device: cpu")


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
