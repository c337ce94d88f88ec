"""One end of `kv_transfer`: a process with a transfer agent over blocks in GPU memory (in rehearsal, the host's).

    python -m benchmarks.gpu.kv_end FD MODE BLOCKS SIZE

    Offer(number, blocks)            -> Offered(handle)          later LeaseOver(number, outcome, at)
    Fetch(number, handle, blocks)    -> nothing                  later FetchOver(number, outcome, ..., started, at)
    Fill(value), Check(value)        -> Filled, Checked(wrong)   bytes of all blocks

Moments are `time.monotonic()`, which all processes of a host share.
"""

import contextlib
import os
import sys
import time
from multiprocessing.connection import Connection, wait

import msgspec
import structlog
import torch

from benchmarks.gpu.machine import Machine, Mode, open_machine
from kvtransfer.agent import TransferAgent
from kvtransfer.backend import BlockBuffer, MemoryKind
from kvtransfer.events import BlocksSafe, FetchEnded, LeaseEnded
from kvtransfer.options import TransferOptions, TransferTimeouts
from twostroke.protocol.ids import SequenceKey, draw_epoch
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.transfer import LayoutFingerprint, TransferHandle
from twostroke.worker.transfer import GpuSteps

_SECRET = bytes(range(32))
_LAYOUT = LayoutFingerprint("benchmark", "bfloat16", 16, 32, 8, 128)
_QUICK = TransferTimeouts(ping_s=0.1, silence_s=0.6, stop_s=0.3)
"""Of a rehearsal."""
_PATIENCE_S = 40.0
_CLOSE_S = 2.0
_IDLE_S = 0.5


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Lease blocks (int32 buffer)."""

    number: int
    blocks: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Have leased blocks written into our blocks (int32 buffer)."""

    number: int
    handle: TransferHandle
    blocks: bytes


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Set all bytes; in block `i` to `(value + i) % 251`."""

    value: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """How many blocks do not hold what `Fill(value)` writes into block `sources[i]`, in block `targets[i]`?"""

    value: int
    sources: bytes
    targets: bytes


Order = Offer | Fetch | Fill | Check


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process serves."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """The lease is open."""

    handle: TransferHandle


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The bytes are set."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """So many blocks are wrong."""

    wrong: int


class LeaseOver(msgspec.Struct, frozen=True, tag=True):
    """A lease has ended."""

    number: int
    outcome: str
    at: float


class FetchOver(msgspec.Struct, frozen=True, tag=True):
    """A fetch has ended; `safe` says whether its blocks may be reused now."""

    number: int
    outcome: str
    reason: str
    safe: bool
    started: float
    at: float


class Safe(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a fetch that had not been safe are."""

    number: int
    at: float


Answer = Ready | Offered | Filled | Checked | LeaseOver | FetchOver | Safe


class KvEnd:
    """Obeys in the child."""

    def __init__(self, connection: Connection, machine: Machine, blocks: int, size: int) -> None:
        self._connection = connection
        self._machine = machine
        device = machine.open_device()
        flat = device.allocate(blocks * size)
        kind = MemoryKind.HOST if machine.rehearses else MemoryKind.CUDA
        steps = None if machine.rehearses else GpuSteps(device)
        self._memory = flat.view(blocks, size)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._started: dict[int, float] = {}
        buffer = BlockBuffer(flat.data_ptr(), size, blocks, flat, kind)
        options = TransferOptions(_SECRET, timeouts=_QUICK if machine.rehearses else TransferTimeouts())
        self._agent = TransferAgent(options, draw_epoch(), _LAYOUT, buffer, wake=self._wake, device=steps)

    def run(self) -> None:
        """Until the other end of the pipe is closed."""
        decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
        with contextlib.suppress(EOFError, ConnectionError):
            self._say(Ready())
            while True:
                ready = wait([self._connection, self._woken], _IDLE_S)
                if self._woken in ready:
                    os.eventfd_read(self._woken)
                self._tell()
                if self._connection in ready:
                    self._obey(decoder.decode(self._connection.recv_bytes()))
        self._agent.close(_CLOSE_S)

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _say(self, answer: Answer) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(answer))

    def _tell(self) -> None:
        for event in self._agent.poll():
            now = time.monotonic()
            match event:
                case LeaseEnded(key, outcome):
                    self._say(LeaseOver(key.client_id, outcome.value, now))
                case FetchEnded(number, outcome, safe, _, reason):
                    started = self._started.pop(number)
                    self._say(FetchOver(number, outcome.value, reason, safe, started, now))
                case BlocksSafe(number):
                    self._say(Safe(number, now))

    def _obey(self, order: Order) -> None:
        match order:
            case Offer(number, blocks):
                handle = self._agent.offer(SequenceKey(number), unpack_tokens(blocks), _PATIENCE_S)
                self._say(Offered(handle))
            case Fetch(number, handle, blocks):
                targets = unpack_tokens(blocks)
                self._started[number] = time.monotonic()
                self._agent.fetch(number, handle, range(len(targets)), targets, _PATIENCE_S)
            case Fill(value):
                self._memory.copy_(self._pattern(value)[:, None])
                self._machine.wait()
                self._say(Filled())
            case Check(value, sources, targets):
                expected = self._pattern(value)[list(unpack_tokens(sources))]
                found = self._memory[list(unpack_tokens(targets))]
                self._say(Checked(int((found != expected[:, None]).any(dim=1).sum())))

    def _pattern(self, value: int) -> torch.Tensor:
        numbers = torch.arange(len(self._memory), device=self._memory.device)
        return ((numbers + value) % 251).to(torch.uint8)


def main() -> None:
    """Read the command line, and serve."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    fd, mode, blocks, size = sys.argv[1:]
    KvEnd(Connection(int(fd)), open_machine(Mode(mode)), int(blocks), int(size)).run()


if __name__ == "__main__":
    main()
