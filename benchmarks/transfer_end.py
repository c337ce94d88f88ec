"""One end of the transfers that `kv_transfer` measures: a process with a `kvtransfer` agent and a bare put loop.

Both use the same memory.

    benchmark                       source                          target
      | Offer(blocks) ---------------->| lease
      |<- Offered(handle) -------------|
      | Fetch(handle, copies) ----------------------------------------->| reserve, wait for the end
      |                                |<======= control, puts =======>|
      |<- Took(seconds) -----------------------------------------------|
      | OpenDoor ------------------------------------------------------>|
      | Serve --------------------------------------------------------->| spins until the next order
      | Put(door, copies) ------------>| put, ..., flush ============>|
      |<- Took(seconds) ---------------|

Orders and answers are msgpack over a pair of sockets; one answer each, but for `Serve` and `Stop`. A wait for an
answer has a deadline.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import msgspec

from benchmarks.block_memory import BlockMemory
from benchmarks.put_loop import Door, PutSource, PutTarget
from kvtransfer.agent import TransferAgent
from kvtransfer.events import FetchEnded, TransferOutcome
from kvtransfer.options import SharedMemory, TransferOptions
from twostroke.protocol.ids import SequenceKey, draw_epoch
from twostroke.protocol.tokens import pack_tokens, unpack_tokens
from twostroke.protocol.transfer import LayoutFingerprint, TransferHandle

_SECRET = bytes(32)
_LAYOUT = LayoutFingerprint("benchmark", "bfloat16", 16, 30, 3, 64)
_PATIENCE_S = 60.0
_CLOSE_S = 5.0


class Copies(msgspec.Struct, frozen=True):
    """Block `sources[i]` goes to block `targets[i]`; int32 buffers."""

    sources: bytes
    targets: bytes

    @classmethod
    def of(cls, sources: Sequence[int], targets: Sequence[int]) -> Self:
        """From block numbers."""
        return cls(pack_tokens(sources), pack_tokens(targets))


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Lease blocks of the source, in this order."""

    number: int
    blocks: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Fetch all of a lease into these blocks of the target."""

    number: int
    handle: TransferHandle
    targets: bytes


class OpenDoor(msgspec.Struct, frozen=True, tag=True):
    """Open the target of the put loop."""


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Receive puts until the next order."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Run the put loop."""

    door: Door
    copies: Copies


class Number(msgspec.Struct, frozen=True, tag=True):
    """Mark all blocks with their numbers."""


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Unmark all blocks."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Count the blocks of the target that do not hold their source."""

    copies: Copies


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the agent and end."""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """A lease is there."""

    handle: TransferHandle


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The put loop's target is there."""

    door: Door


class Took(msgspec.Struct, frozen=True, tag=True):
    """What was asked for is done, after so long."""

    seconds: float


class Checked(msgspec.Struct, frozen=True, tag=True):
    """So many blocks are wrong."""

    wrong: int


Order = Offer | Fetch | OpenDoor | Serve | Put | Number | Clear | Check | Stop
Answer = Offered | Opened | Took | Checked
_A = TypeVar("_A", bound=Answer)


class TransferEnd:
    """The benchmark's handle of one end; a context manager that ends the process.

    Args:
        nbytes: Memory of this end.
        size: Bytes of a block.
        shared_memory: Whether UCX may use cma.
    """

    def __init__(self, nbytes: int, size: int, shared_memory: SharedMemory) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.transfer_end", str(theirs.fileno()), str(nbytes), str(size)]
        with theirs:
            self.process = subprocess.Popen(
                [*command, shared_memory.value], pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._await()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.order(Stop())
        try:
            self.process.wait(2 * _CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._connection.close()

    def order(self, order: Order) -> None:
        """Give an order."""
        self._connection.send_bytes(msgspec.msgpack.encode(order))

    def took(self, order: Order) -> float:
        """Give an order, and wait until it is done; how long it took there."""
        return self._ask(order, Took).seconds

    def offer(self, number: int, blocks: bytes) -> TransferHandle:
        """Lease blocks."""
        return self._ask(Offer(number, blocks), Offered).handle

    def open_door(self) -> Door:
        """Open the put loop's target."""
        return self._ask(OpenDoor(), Opened).door

    def wrong(self, copies: Copies) -> int:
        """How many blocks do not hold their source."""
        return self._ask(Check(copies), Checked).wrong

    def _ask(self, order: Order, kind: type[_A]) -> _A:
        """Give an order that is answered with a `kind`."""
        self.order(order)
        answer = self._await()
        if not isinstance(answer, kind):
            raise RuntimeError(f"process {self.process.pid} answered {order} with {answer}")  # noqa: TRY004 - no wrong argument
        return answer

    def _await(self) -> Answer:
        if not self._connection.poll(_PATIENCE_S):
            raise RuntimeError(f"process {self.process.pid} did not answer in {_PATIENCE_S:g} s")
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except EOFError:
            raise RuntimeError(f"process {self.process.pid} ended: status {self.process.wait(_CLOSE_S)}") from None


class _Worker:
    """What obeys in the child."""

    def __init__(self, connection: Connection, nbytes: int, size: int, shared_memory: SharedMemory) -> None:
        self._connection = connection
        self._size = size
        self._shared_memory = shared_memory
        self._memory = BlockMemory(nbytes)
        self._woken = threading.Event()
        options = TransferOptions(_SECRET, shared_memory=shared_memory)
        self._agent = TransferAgent(options, draw_epoch(), _LAYOUT, self._memory.buffer(size), wake=self._woken.set)
        self._target: PutTarget | None = None
        self._source: PutSource | None = None

    def run(self) -> None:
        """Obey until told to stop."""
        decoder = msgspec.msgpack.Decoder(Order)
        self._answer(Took(0.0))
        while True:
            order = decoder.decode(self._connection.recv_bytes())
            if isinstance(order, Stop):
                self._agent.close(_CLOSE_S)
                return
            answer = self._obey(order)
            if answer is not None:
                self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(answer))

    def _obey(self, order: Order) -> Answer | None:
        answer: Answer | None = Took(0.0)
        match order:
            case Offer(number, blocks):
                self._agent.poll()  # the ends of earlier leases
                answer = Offered(self._agent.offer(SequenceKey(number), unpack_tokens(blocks), _PATIENCE_S))
            case Fetch():
                answer = Took(self._fetch(order))
            case OpenDoor():
                self._target = PutTarget(self._memory, self._shared_memory)
                answer = Opened(self._target.door())
            case Serve():
                self._serve()
                answer = None
            case Put(door, copies):
                answer = Took(self._put(door, copies))
            case Check(copies):
                numbers = unpack_tokens(copies.sources), unpack_tokens(copies.targets)
                answer = Checked(self._memory.wrong(*numbers, self._size))
            case Number():
                self._memory.number(self._size)
            case Clear():
                self._memory.clear(self._size)
        return answer

    def _serve(self) -> None:
        if self._target is None:
            raise RuntimeError("the door is not open")
        while not self._connection.poll(0):
            self._target.progress()

    def _fetch(self, order: Fetch) -> float:
        """As a generation worker does: from the reservation until its engine thread knows that all blocks are there."""
        targets = unpack_tokens(order.targets)
        positions = range(len(targets))
        start = time.perf_counter()
        self._agent.fetch(order.number, order.handle, positions, targets, _PATIENCE_S)
        while True:
            if not self._woken.wait(_PATIENCE_S):
                raise TimeoutError(f"transfer {order.number} did not end in {_PATIENCE_S:g} s")
            self._woken.clear()
            for event in self._agent.poll():
                if isinstance(event, FetchEnded):
                    seconds = time.perf_counter() - start
                    if event.outcome is not TransferOutcome.DONE:
                        raise RuntimeError(f"transfer {order.number} {event.outcome}: {event.reason}")
                    return seconds

    def _put(self, door: Door, copies: Copies) -> float:
        if self._source is None:
            self._source = PutSource(self._memory, self._shared_memory, door)
        sources, targets = unpack_tokens(copies.sources), unpack_tokens(copies.targets)
        start = time.perf_counter()
        self._source.write(sources, targets, self._size)
        return time.perf_counter() - start


def main() -> None:
    """Run one end: descriptor of the connection, bytes of memory, bytes of a block, `SharedMemory`."""
    fd, nbytes, size, shared_memory = sys.argv[1:]
    _Worker(Connection(int(fd)), int(nbytes), int(size), SharedMemory(shared_memory)).run()


if __name__ == "__main__":
    main()
