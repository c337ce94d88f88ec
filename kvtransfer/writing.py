"""One transfer's writes on the context side: issued in slices, polled, flushed at the end."""

from collections import deque
from collections.abc import Iterable

from kvtransfer.backend import BackendError, BlockBuffer, Connection, Operation, OperationState
from kvtransfer.coalesce import Run
from kvtransfer.counters import TransferCounters


class Writing:
    """Copies runs of blocks to a peer, with at most `limit` operations in flight.

    Args:
        connection: To the peer's inlet.
        runs: What to copy; consumed as writes are issued.
        buffer: Where the blocks lie here.
        remote_base: Address of the peer's block 0; its blocks have the size of ours.
        limit: Operations in flight.
        counters: Bytes and operations are counted here.
    """

    def __init__(
        self,
        connection: Connection,
        runs: Iterable[Run],
        buffer: BlockBuffer,
        remote_base: int,
        *,
        limit: int,
        counters: TransferCounters,
    ) -> None:
        self.connection = connection
        self._runs = deque(runs)
        self._buffer = buffer
        self._remote_base = remote_base
        self._limit = limit
        self._counters = counters
        self._operations: deque[Operation] = deque()
        self._flush: Operation | None = None
        self.stopping = False

    def stop(self) -> None:
        """Issue no further writes."""
        self._runs.clear()
        self.stopping = True

    def advance(self) -> bool:
        """Reap what is complete and issue what the limit allows; True if anything moved.

        Raises:
            BackendError: An operation failed: the connection is of no more use.
        """
        moved = self._reap()
        while self._runs and len(self._operations) < self._limit:
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
        return not self._operations and self._flush is not None and _complete(self._flush)

    def _reap(self) -> bool:
        moved = False
        while self._operations and _complete(self._operations[0]):
            self._operations.popleft()
            moved = True
        return moved

    def _issue(self, run: Run) -> None:
        size = self._buffer.block_bytes
        local = self._buffer.address + run.source * size
        remote = self._remote_base + run.target * size
        self._operations.append(self.connection.write(local, remote, run.count * size))
        self._counters.operations += 1
        self._counters.bytes_written += run.count * size


def _complete(operation: Operation) -> bool:
    state = operation.poll()
    if state is OperationState.FAILED:
        raise BackendError(f"a write to the generation worker failed: {operation.error}")
    return state is OperationState.COMPLETE
