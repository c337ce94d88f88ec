"""One transfer's writes on the context side: issued in slices, polled, flushed at the end."""

from collections import deque
from collections.abc import Iterable

from kvtransfer.backend import BackendError, BlockBuffer, Connection, Operation, OperationState
from kvtransfer.coalesce import Run
from kvtransfer.counters import TransferCounters
from kvtransfer.options import TransferLimits


class Writing:
    """Copies runs of blocks to a peer, with bounded operations and bytes in flight.

    Args:
        connection: To the peer's inlet.
        runs: What to copy; consumed as writes are issued.
        buffer: Where the blocks lie here.
        remote_base: Address of the peer's block 0; its blocks have the size of ours.
        limits: Bounds of what is in flight.
        counters: Bytes and operations are counted here.
    """

    def __init__(
        self,
        connection: Connection,
        runs: Iterable[Run],
        buffer: BlockBuffer,
        remote_base: int,
        *,
        limits: TransferLimits,
        counters: TransferCounters,
    ) -> None:
        self.connection = connection
        self._runs = deque(runs)
        self._buffer = buffer
        self._remote_base = remote_base
        self._limits = limits
        self._counters = counters
        self._in_flight: deque[tuple[Operation, int]] = deque()  # with the bytes of each
        self._bytes_in_flight = 0
        self._flush: Operation | None = None
        self.stopping = False

    def stop(self) -> None:
        """Issue no further writes."""
        self._runs.clear()
        self.stopping = True

    @property
    def flushing(self) -> bool:
        """Whether all writes have been issued."""
        return self._flush is not None

    def advance(self) -> bool:
        """Reap what is complete and issue what the limit allows; True if anything moved.

        Raises:
            BackendError: An operation failed: the connection is of no more use.
        """
        moved = self._reap()
        while self._runs and self._room():
            self._issue(self._runs.popleft())
            moved = True
        if not self._runs and self._flush is None:
            self._flush = self.connection.flush()
            self._counters.operations += 1
            moved = True
        return moved

    def landed(self) -> bool:
        """Whether every write is complete and a flush has proven that the peer has its bytes.

        Raises:
            BackendError: The flush failed.
        """
        return not self._in_flight and self._flush is not None and _complete(self._flush)

    def _reap(self) -> bool:
        moved = False
        while self._in_flight and _complete(self._in_flight[0][0]):
            self._bytes_in_flight -= self._in_flight.popleft()[1]
            moved = True
        return moved

    def _room(self) -> bool:
        """Whether another write may start; its size may exceed the bound of bytes by one operation's."""
        limits = self._limits
        return len(self._in_flight) < limits.operations and self._bytes_in_flight < limits.bytes_in_flight

    def _issue(self, run: Run) -> None:
        size = self._buffer.block_bytes
        local = self._buffer.address + run.source * size
        remote = self._remote_base + run.target * size
        nbytes = run.length * size
        self._in_flight.append((self.connection.write(local, remote, nbytes), nbytes))
        self._bytes_in_flight += nbytes
        self._counters.operations += 1
        self._counters.bytes_written += nbytes


def _complete(operation: Operation) -> bool:
    state = operation.poll()
    if state is OperationState.FAILED:
        raise BackendError(f"a write to the generation worker failed: {operation.error}")
    return state is OperationState.COMPLETE
