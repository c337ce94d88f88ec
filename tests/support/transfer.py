"""Transfer agents over plain memory, for tests."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.agent import TransferAgent
from kvtransfer.backend import BlockBuffer
from kvtransfer.device import MemoryDevice
from kvtransfer.events import BlocksSafe, FetchEnded, LeaseEnded, TransferEvent
from kvtransfer.loopback import LoopbackFabric
from kvtransfer.options import BackendKind, SharedMemory, TransferOptions, TransferTimeouts
from twostroke.protocol.ids import SequenceKey, draw_epoch
from twostroke.protocol.transfer import LayoutFingerprint

SECRET = bytes(range(32))
LAYOUT = LayoutFingerprint("m" * 8, "float32", 16, 2, 2, 16)
CANARY = 0xEE
DEFAULT_TIMEOUTS = TransferTimeouts()

Memory = npt.NDArray[np.uint8]


def block_bytes_of(number: int, size: int) -> Memory:
    """The content that block `number` of a context worker has in these tests: a pattern that no other block has."""
    pattern: Memory = (np.arange(size, dtype=np.uint32) * 31 + number * 7919 + number).astype(np.uint8)
    pattern[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
    return pattern


def context_memory(blocks: int, size: int) -> Memory:
    """A context worker's cache: block i holds `block_bytes_of(i)`."""
    return np.stack([block_bytes_of(number, size) for number in range(blocks)])


def generation_memory(blocks: int, size: int) -> Memory:
    """A generation worker's cache: canaries everywhere."""
    return np.full((blocks, size), CANARY, np.uint8)


def buffer_of(memory: Memory) -> BlockBuffer:
    """`memory`, shaped [block, byte], as an agent's buffer."""
    return BlockBuffer(memory.ctypes.data, memory.shape[1], memory.shape[0], owner=memory)


class Worker:
    """An agent with its memory, and the events that it told so far."""

    def __init__(
        self,
        memory: Memory,
        *,
        fabric: LoopbackFabric | None = None,
        layout: LayoutFingerprint = LAYOUT,
        secret: bytes = SECRET,
        timeouts: TransferTimeouts = DEFAULT_TIMEOUTS,
        epoch: int | None = None,
        bind: str = "tcp://127.0.0.1:0",
        shared_memory: SharedMemory = SharedMemory.OFF,
        device: MemoryDevice | None = None,
    ) -> None:
        kind = BackendKind.UCX if fabric is None else BackendKind.LOOPBACK
        options = TransferOptions(secret, bind=bind, backend=kind, timeouts=timeouts, shared_memory=shared_memory)
        self.memory = memory
        self.epoch = draw_epoch() if epoch is None else epoch
        self.wakes = 0
        self.events: list[TransferEvent] = []
        self.agent = TransferAgent(
            options, self.epoch, layout, buffer_of(memory), wake=self._woken, device=device, fabric=fabric
        )

    def _woken(self) -> None:
        self.wakes += 1

    def wait(self, found: Callable[[list[TransferEvent]], bool], timeout_s: float = 10.0) -> None:
        """Poll until `found` is true of all events so far."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.events += self.agent.poll()
            if found(self.events):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {timeout_s} s; events: {self.events}; {self.agent.counters()}")
            time.sleep(0.002)

    def fetch_end(self, transfer_id: int, timeout_s: float = 10.0) -> FetchEnded:
        """The end of a fetch, waited for; there must be only one."""

        def ends() -> list[FetchEnded]:
            return [e for e in self.events if isinstance(e, FetchEnded) and e.transfer_id == transfer_id]

        self.wait(lambda _: bool(ends()), timeout_s)
        (ended,) = ends()
        return ended

    def lease_end(self, key: SequenceKey, timeout_s: float = 10.0) -> LeaseEnded:
        """The end of a lease, waited for; there must be only one."""

        def ends() -> list[LeaseEnded]:
            return [e for e in self.events if isinstance(e, LeaseEnded) and e.key == key]

        self.wait(lambda _: bool(ends()), timeout_s)
        (ended,) = ends()
        return ended

    def safe(self, transfer_id: int, timeout_s: float = 10.0) -> None:
        """Wait for `BlocksSafe`."""
        self.wait(lambda events: BlocksSafe(transfer_id) in events, timeout_s)

    def assert_only_written(self, written: dict[int, int]) -> None:
        """Every block holds canaries, but block b holds context block `written[b]`."""
        for number, content in enumerate(self.memory):
            if number in written:
                expected = block_bytes_of(written[number], len(content))
                assert np.array_equal(content, expected), f"block {number} does not hold block {written[number]}"
            else:
                assert (content == CANARY).all(), f"block {number} was touched"

    def close(self) -> None:
        """End the agent."""
        self.agent.close(10.0)


def expected_content(positions: Sequence[int], leased: Sequence[int], blocks: Sequence[int]) -> dict[int, int]:
    """Which context block each written block holds."""
    return {block: leased[position] for position, block in zip(positions, blocks, strict=True)}
