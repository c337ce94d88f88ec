"""What UCX's choices mean: which binding is used, which library, and which way KV blocks travel, in words."""

from dataclasses import dataclass

from kvtransfer.backend import MemoryKind
from twostroke.cli.doctor.facts import HostFacts, ProbeFault, Protocol, TransportFacts
from twostroke.cli.doctor.finding import Finding, Status

BINDING = "ucx.binding"
LIBRARY = "ucx.library"
TRANSPORTS = "ucx.transports"

_WAYS = {
    "tcp": "through the kernel's sockets",
    "cma": "one copy by the kernel, straight from process to process",
    "cuda_ipc": "copied from GPU to GPU",
}
_INSTALL = "install ucxx-cu13 (ucxx-cu12 beside a CUDA 12 torch), or ucx-py from NVIDIA's package index"


@dataclass(frozen=True, slots=True)
class Route:
    """Between which processes blocks in which memory travel.

    Attributes:
        memory: Where blocks lie, on both sides.
        across_hosts: Whether the processes run on two hosts.
        shared_memory: Whether the configuration allows cma.
        bound_to_loopback: The address that keeps transfers on this host as it is configured; None if none does.
    """

    memory: MemoryKind
    across_hosts: bool
    shared_memory: bool
    bound_to_loopback: str | None = None

    @property
    def name(self) -> str:
        """The name of its finding, such as `ucx.transports.cuda.same_host`."""
        return f"{TRANSPORTS}.{self.memory}.{'across_hosts' if self.across_hosts else 'same_host'}"

    @property
    def words(self) -> str:
        """For sentences."""
        return f"{self.memory} memory {'across hosts' if self.across_hosts else 'between processes of this host'}"


def check_binding(host: HostFacts) -> Finding:
    """Which Python package brings UCX."""
    if host.binding is None:
        found = f"none is importable (installed packages: {', '.join(host.bindings) or 'none'})"
        return Finding(BINDING, Status.PROBLEM, found, f"{_INSTALL}; without one, only `twostroke serve` works")
    installed = ", ".join(host.bindings) or "unknown packages"
    if sum(name.startswith("ucxx-") for name in host.bindings) > 1:
        todo = "uninstall both and install the one that fits torch's CUDA version: they overwrite each other's files"
        return Finding(BINDING, Status.WARNING, f"module {host.binding}, from one of {installed}", todo)
    return Finding(BINDING, Status.OK, f"module {host.binding} is used; installed: {installed}")


def check_library(facts: TransportFacts | ProbeFault) -> Finding:
    """Which UCX was loaded."""
    if isinstance(facts, ProbeFault):
        todo = "set UCX_LOG_LEVEL=info and run this again"
        return Finding(LIBRARY, Status.PROBLEM, f"the process that loads UCX and moves a block {facts.what}", todo)
    if facts.ucx is None:
        return Finding(LIBRARY, Status.PROBLEM, facts.error, _INSTALL)
    verbs = "with verbs (InfiniBand, RoCE)" if facts.ucx.verbs else "without verbs (no InfiniBand, no RoCE)"
    return Finding(LIBRARY, Status.OK, f"UCX {facts.ucx.version} from {facts.ucx.library}, {verbs}")


def check_route(route: Route, facts: TransportFacts | ProbeFault) -> Finding:
    """Which way blocks travel on `route`, as UCX said when one did."""
    if isinstance(facts, ProbeFault):
        found = f"{route.words}: the process that moved a block {facts.what}"
        return Finding(route.name, Status.PROBLEM, found, "set UCX_LOG_LEVEL=info and run this again")
    if facts.error:
        todo = "look at UCX_* in the environment and at firewalls; UCX_LOG_LEVEL=info tells more"
        return Finding(route.name, Status.PROBLEM, f"{route.words}: {facts.error}", todo)
    if facts.protocol is None:
        found = f"{route.words}: a block arrived, but UCX did not say by what"
        return Finding(route.name, Status.NOTE, found, "unset UCX_PROTO_ENABLE to see it")
    return _judge(route, facts.protocol)


def unreachable_route(route: Route) -> Finding:
    """For a host without a network."""
    found = f"{route.words}: no network interface but loopback is up"
    return Finding(route.name, Status.NOTE, found, "roles on other hosts need a network")


def _judge(route: Route, protocol: Protocol) -> Finding:
    transport, _, rest = protocol.by.partition("/")
    device = rest.split(" ", 1)[0]
    over = f" over {device}" if transport == "tcp" and device else ""
    way = _WAYS.get(transport, "a way that this check has no words for")
    found = f"{route.words}: {transport}{over} ({protocol.how}): {way}"
    if transport == "tcp" and route.memory is MemoryKind.CUDA:
        staged = "; each block is copied to host memory, sent, and copied to the GPU: slow"
        return Finding(route.name, Status.WARNING, found + staged, _staging_todo(route))
    if route.bound_to_loopback:
        found = f"{found}; but transfer.bind is {route.bound_to_loopback}, which keeps transfers on this host"
        todo = "for roles on several hosts, set transfer.bind of both to an address that the others reach"
        return Finding(route.name, Status.NOTE, found, todo)
    if transport == "tcp" and not route.across_hosts and not route.shared_memory:
        found = (
            f"{found}; cma would be faster, but is used only with transfer.shared_memory: true, since killing a "
            "process that is being written then aborts its writer"
        )
    return Finding(route.name, Status.OK, found)


def _staging_todo(route: Route) -> str:
    if route.across_hosts:
        return "keep roles that exchange many KV blocks on one host, where cuda_ipc joins GPUs that reach each other"
    return (
        "for cuda_ipc: GPUs that reach each other (gpu.peer_access), both processes in one IPC and PID namespace, and "
        "PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
    )
