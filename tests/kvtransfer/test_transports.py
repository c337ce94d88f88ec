"""Which transports UCX may choose from, and which of them leave a closed inlet a proof."""

import pytest

from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory
from kvtransfer.transports import allowed_transports


@pytest.mark.parametrize(
    ("memory", "shared_memory", "names"),
    [
        (MemoryKind.HOST, SharedMemory.OFF, {"tcp", "self"}),
        (MemoryKind.HOST, SharedMemory.CMA, {"tcp", "self", "cma"}),
        (MemoryKind.CUDA, SharedMemory.OFF, {"tcp", "self", "cuda_copy", "cuda_ipc"}),
        (MemoryKind.CUDA, SharedMemory.CMA, {"tcp", "self", "cuda_copy", "cuda_ipc", "cma"}),
    ],
)
def test_transports_by_memory_and_setting(memory: MemoryKind, shared_memory: SharedMemory, names: set[str]) -> None:
    """None whose failure aborts the writer unless asked for, and none that stays within the host beyond it."""
    allowed = allowed_transports(memory, shared_memory)
    assert set(allowed.names) == names
    assert allowed.close_is_proof is (names == {"tcp", "self"})
    assert set(allowed.across_hosts().names) == names - {"cma", "cuda_ipc"}
    assert allowed.across_hosts().close_is_proof
