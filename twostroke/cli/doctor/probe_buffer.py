"""Memory for the transport probes: a block on the host, or on a GPU."""

import ctypes
import mmap

from kvtransfer.backend import BlockBuffer, MemoryKind

PROBE_BYTES = 1 << 20
"""As large as the blocks of a large model, so that UCX chooses as it would for those."""


def make_buffer(memory: MemoryKind, *, last_gpu: bool) -> BlockBuffer:
    """One block in `memory`; on the last GPU or on the first, so that two processes use two where there are two."""
    if memory is MemoryKind.HOST:
        pages = mmap.mmap(-1, PROBE_BYTES)
        return BlockBuffer(ctypes.addressof(ctypes.c_char.from_buffer(pages)), PROBE_BYTES, 1, pages)
    import torch  # noqa: PLC0415 - the probes of host memory do without

    number = torch.cuda.device_count() - 1 if last_gpu else 0
    torch.cuda.set_device(number)
    tensor = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=f"cuda:{number}")
    torch.cuda.synchronize()
    return BlockBuffer(tensor.data_ptr(), PROBE_BYTES, 1, tensor, memory)
