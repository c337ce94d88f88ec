"""Transfers between tensors, on the CPU or on GPUs, by the parts that a worker uses.

Run as a module it is the context worker: it queues a step that writes its blocks late, offers them at once, prints the
handle in hexadecimal, then how the lease ended.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
import torch

from kvtransfer.agent import TransferAgent
from kvtransfer.backend import BlockBuffer, MemoryKind
from kvtransfer.device import HostDevice, MemoryDevice
from kvtransfer.events import LeaseEnded, TransferEvent
from kvtransfer.options import TransferOptions
from tests.support.transfer import LAYOUT, SECRET
from twostroke.engine.cuda_pool import allocate_pool
from twostroke.engine.device.cuda import CudaDevice
from twostroke.protocol.ids import SequenceKey, draw_epoch
from twostroke.worker.transfer import GpuSteps

BLOCKS, SIZE = 32, 1 << 17
KEY = SequenceKey(1, 0, 0)
_SLOW_CYCLES = 500_000_000
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class TensorWorker:
    """An agent over a tensor.

    Attributes:
        agent: Moves its blocks.
        blocks: uint8 [block, byte].
    """

    agent: TransferAgent
    blocks: torch.Tensor

    def wait(self) -> TransferEvent:
        """The next event."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (events := self.agent.poll()):
            assert time.monotonic() < deadline, f"no event in {_DEADLINE_S} s"
            time.sleep(0.001)
        return events[0]


def open_worker(device: torch.device) -> TensorWorker:
    """A worker whose blocks lie on `device`, zero at first."""
    on_gpu = device.type == "cuda"
    flat = allocate_pool(BLOCKS * SIZE, device) if on_gpu else torch.zeros(BLOCKS * SIZE, dtype=torch.uint8)
    kind = MemoryKind.CUDA if on_gpu else MemoryKind.HOST
    steps: MemoryDevice = GpuSteps(CudaDevice(device)) if on_gpu else HostDevice()
    buffer = BlockBuffer(flat.data_ptr(), SIZE, BLOCKS, flat, kind)
    agent = TransferAgent(TransferOptions(SECRET), draw_epoch(), LAYOUT, buffer, wake=lambda: None, device=steps)
    return TensorWorker(agent, flat.view(BLOCKS, SIZE))


def pattern(device: torch.device) -> torch.Tensor:
    """What the context worker's blocks hold in the end: uint8 [block, byte], no two blocks alike."""
    numbers = torch.arange(BLOCKS, device=device)[:, None] * 7919 + torch.arange(SIZE, device=device) * 31
    return (numbers % 251).to(torch.uint8)


def main() -> None:
    """Be the context worker."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    device = torch.device(sys.argv[1])
    worker = open_worker(device)
    content = pattern(device)
    if device.type == "cuda":
        sleep: Any = torch.cuda._sleep
        sleep(_SLOW_CYCLES)  # the step is queued, and runs for a while before it writes
    worker.blocks.copy_(content)
    handle = worker.agent.offer(KEY, range(BLOCKS), _DEADLINE_S)
    print("handle", msgspec.msgpack.encode(handle).hex(), flush=True)
    ended = worker.wait()
    assert isinstance(ended, LeaseEnded)
    print("lease", ended.outcome.value, flush=True)
    worker.agent.close(10.0)


if __name__ == "__main__":
    main()
