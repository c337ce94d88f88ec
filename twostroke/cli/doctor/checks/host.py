"""What the operating system's limits and devices mean for serving."""

from twostroke.cli.doctor.facts import HostFacts, UcxFacts
from twostroke.cli.doctor.finding import Finding, Status
from twostroke.cli.doctor.units import MIB, mib

RDMA = "rdma.devices"
MEMLOCK = "limits.memlock"
OPEN_FILES = "limits.open_files"
SHARED_MEMORY = "host.shared_memory"

_SPARE_FILES = 512
"""Beside the clients' connections: libraries, queues, and a few for each transfer peer."""
_CONTAINER_DEFAULT = 64 * MIB


def check_host(host: HostFacts, ucx: UcxFacts | None, max_in_flight: int) -> list[Finding]:
    """RDMA devices and limits.

    Args:
        host: What was found.
        ucx: The UCX that is loaded; None if it could not be.
        max_in_flight: Clients' requests that a frontend takes at once.
    """
    return [
        _check_rdma(host, ucx),
        _check_memlock(host),
        _check_open_files(host, max_in_flight),
        _check_shared_memory(host),
    ]


def _check_rdma(host: HostFacts, ucx: UcxFacts | None) -> Finding:
    if not host.rdma_devices:
        return Finding(RDMA, Status.NOTE, "none")
    devices = ", ".join(host.rdma_devices)
    todo = "transfers of this version use tcp between hosts; bind transfer.bind to the fast adapter's IP address"
    if ucx is None or ucx.verbs:
        return Finding(RDMA, Status.NOTE, devices, todo)
    found = (
        f"{devices}; this libucx ({ucx.library}) has no verbs: InfiniBand and RoCE need a system UCX and "
        "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
    )
    return Finding(RDMA, Status.NOTE, found, todo)


def _check_memlock(host: HostFacts) -> Finding:
    if host.memlock is None:
        return Finding(MEMLOCK, Status.OK, "unlimited")
    found = f"{mib(host.memlock)}; enough, since tcp, cma and cuda_ipc lock nothing"
    if host.rdma_devices:
        todo = (
            "`ulimit -l unlimited` (containers: --ulimit memlock=-1) before RDMA is used: it locks the whole KV cache"
        )
        return Finding(MEMLOCK, Status.NOTE, found, todo)
    return Finding(MEMLOCK, Status.OK, found)


def _check_open_files(host: HostFacts, max_in_flight: int) -> Finding:
    if host.open_files is None:
        return Finding(OPEN_FILES, Status.OK, "unlimited")
    wanted = max_in_flight + _SPARE_FILES
    if host.open_files >= wanted:
        return Finding(OPEN_FILES, Status.OK, f"{host.open_files}")
    found = f"{host.open_files}; frontend.max_in_flight of {max_in_flight} connections would need about {wanted}"
    return Finding(OPEN_FILES, Status.WARNING, found, f"`ulimit -n {wanted}`, or lower frontend.max_in_flight")


def _check_shared_memory(host: HostFacts) -> Finding:
    if host.shared_memory is None:
        return Finding(SHARED_MEMORY, Status.NOTE, "no /dev/shm; nothing here needs it")
    found = f"{mib(host.shared_memory)} in /dev/shm"
    if host.shared_memory <= _CONTAINER_DEFAULT:
        todo = (
            "enough for transfers, which do not use it; give ranks of one tensor-parallel worker 1 GiB (--shm-size=1g)"
        )
        return Finding(SHARED_MEMORY, Status.NOTE, found, todo)
    return Finding(SHARED_MEMORY, Status.OK, found)
