"""Which of UCX's transports a transfer may use; UCX chooses the fastest of them for each pair of processes.

    host memory    tcp, and cma between processes of one host if asked for
    CUDA memory    cuda_ipc between GPUs of one host that reach each other; else tcp, where cuda_copy stages the bytes
                   through host memory on both sides

Left out: cma unless asked for (when the target of such writes is killed, UCX aborts the writer), and InfiniBand, whose
failed writes would abort the writer likewise while UCX's endpoint error handling is off.
"""

from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory

_SOCKETS = ("tcp", "self")
_BETWEEN_GPUS = ("cuda_copy", "cuda_ipc")


def allowed_transports(memory: MemoryKind, shared_memory: SharedMemory) -> tuple[str, ...]:
    """UCX's names of the transports for a buffer in `memory`."""
    cuda = _BETWEEN_GPUS if memory is MemoryKind.CUDA else ()
    cma = ("cma",) if shared_memory is SharedMemory.CMA else ()
    return (*_SOCKETS, *cuda, *cma)


def writer_reaches_in(memory: MemoryKind, shared_memory: SharedMemory) -> bool:
    """Whether a writer may write our memory by itself, so that closing our side is no proof that it has stopped."""
    return memory is MemoryKind.CUDA or shared_memory is SharedMemory.CMA
