"""Which of UCX's transports a transfer may use; UCX chooses the fastest of them for each pair of processes.

    host memory    tcp, and cma between processes of one host if asked for
    CUDA memory    cuda_ipc between GPUs of one host that reach each other; else tcp, where cuda_copy stages the bytes
                   through host memory on both sides

Left out: cma unless asked for (when the target of such writes is killed, UCX aborts the writer), and InfiniBand, whose
behaviour at a peer's death has yet to be measured.
"""

from dataclasses import dataclass, replace

from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory

_WITHIN_A_HOST = frozenset({"cma", "cuda_ipc"})
"""Here the writer reaches into the target's memory by itself."""


@dataclass(frozen=True, slots=True)
class Transports:
    """UCX's names of the transports that it may choose from."""

    names: tuple[str, ...]

    @property
    def close_is_proof(self) -> bool:
        """Whether a target that closes its side can no longer be written, whichever of them was chosen."""
        return _WITHIN_A_HOST.isdisjoint(self.names)

    def across_hosts(self) -> "Transports":
        """Those of them that reach another host."""
        return replace(self, names=tuple(name for name in self.names if name not in _WITHIN_A_HOST))


def allowed_transports(memory: MemoryKind, shared_memory: SharedMemory) -> Transports:
    """The transports for a buffer in `memory`."""
    cuda = ("cuda_copy", "cuda_ipc") if memory is MemoryKind.CUDA else ()
    cma = ("cma",) if shared_memory is SharedMemory.CMA else ()
    return Transports(("tcp", "self", *cuda, *cma))
