"""The transport within one process: a write is a copy of memory, done by the writer in `progress`.

Backends that share a `LoopbackFabric` reach each other. It serves tests and deployments whose roles share a process.
"""

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Sequence

from kvtransfer.backend import Backend, BackendError, BlockBuffer, Connection, Inlet, Operation, OperationState


class LoopbackFabric:
    """Where the inlets of one process find each other; safe to use from several transfer threads."""

    def __init__(self) -> None:
        self._names = itertools.count(1)
        self._inlets: dict[bytes, BlockBuffer] = {}
        self._lock = threading.Lock()

    def open(self, buffer: BlockBuffer) -> bytes:
        """The name of a new inlet into `buffer`."""
        with self._lock:
            name = b"loopback:%d" % next(self._names)
            self._inlets[name] = buffer
        return name

    def close(self, name: bytes) -> None:
        """Close an inlet; when this returns, no copy into it runs or will."""
        with self._lock:
            self._inlets.pop(name, None)

    def copy(self, name: bytes, source: int, target: int, nbytes: int) -> str:
        """Copy into an open inlet; why not, or an empty string."""
        with self._lock:
            buffer = self._inlets.get(name)
            if buffer is None:
                return f"inlet {name.decode()} is closed"
            if not buffer.address <= target <= target + nbytes <= buffer.address + buffer.nbytes:
                return f"{nbytes} bytes at {target:#x} are outside inlet {name.decode()}"
            ctypes.memmove(target, source, nbytes)
        return ""


class LoopbackOperation(Operation):
    """A copy that waits for `progress`, or a flush behind earlier copies."""

    def __init__(self) -> None:
        self._state = OperationState.PENDING
        self._error = ""

    def poll(self) -> OperationState:
        """Where it stands."""
        return self._state

    @property
    def error(self) -> str:
        """Why it failed."""
        return self._error

    def finish(self, error: str) -> None:
        """Complete, or fail with `error`."""
        self._error = error
        self._state = OperationState.FAILED if error else OperationState.COMPLETE


class LoopbackConnection(Connection):
    """Copies to one inlet, in order."""

    def __init__(self, fabric: LoopbackFabric, name: bytes) -> None:
        self._fabric = fabric
        self._name = name
        self._queue: deque[tuple[LoopbackOperation, int, int, int]] = deque()
        self._broken = ""
        self.closed = False

    def write(self, local_address: int, remote_address: int, nbytes: int) -> Operation:
        """Queue a copy."""
        return self._enqueue(local_address, remote_address, nbytes)

    def flush(self) -> Operation:
        """Queue a mark behind all earlier copies."""
        return self._enqueue(0, 0, 0)

    def _enqueue(self, local: int, remote: int, nbytes: int) -> Operation:
        if self._broken:
            raise BackendError(self._broken)
        operation = LoopbackOperation()
        self._queue.append((operation, local, remote, nbytes))
        return operation

    def progress(self) -> None:
        """Do all queued copies."""
        while self._queue:
            operation, local, remote, nbytes = self._queue.popleft()
            if nbytes and not self._broken:
                self._broken = self._fabric.copy(self._name, local, remote, nbytes)
            operation.finish(self._broken)

    def close(self) -> None:
        """Drop what is queued."""
        self.closed = True
        self._broken = "connection is closed"
        while self._queue:
            self._queue.popleft()[0].finish(self._broken)


class LoopbackInlet(Inlet):
    """An inlet by name; the name is the right to write."""

    def __init__(self, fabric: LoopbackFabric, buffer: BlockBuffer) -> None:
        self._fabric = fabric
        self._name = fabric.open(buffer)

    @property
    def address(self) -> bytes:
        """The inlet's name."""
        return self._name

    @property
    def key(self) -> bytes:
        """Nothing: the name is the right."""
        return b""

    def close(self) -> None:
        """No copy into it runs once this returns."""
        self._fabric.close(self._name)


class LoopbackBackend(Backend):
    """One side's view of a fabric."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        self._fabric = fabric
        self._buffer: BlockBuffer | None = None
        self._connections: list[LoopbackConnection] = []
        self._inlets: list[LoopbackInlet] = []

    @property
    def close_is_proof(self) -> bool:
        """True: closing waits for a copy that runs."""
        return True

    def register(self, buffer: BlockBuffer) -> None:
        """Remember the buffer."""
        self._buffer = buffer

    def open_inlet(self) -> Inlet:
        """A new inlet into the registered buffer."""
        if self._buffer is None:
            raise BackendError("register a buffer before opening an inlet")
        inlet = LoopbackInlet(self._fabric, self._buffer)
        self._inlets.append(inlet)
        return inlet

    def connect(self, address: bytes, key: bytes) -> Connection:
        """A connection by the inlet's name."""
        if key or not address.startswith(b"loopback:"):
            raise BackendError("the peer's address is not of the loopback transport; use one backend on both roles")
        connection = LoopbackConnection(self._fabric, address)
        self._connections.append(connection)
        return connection

    def progress(self) -> bool:
        """Do all queued copies of all connections."""
        self._connections = [connection for connection in self._connections if not connection.closed]
        for connection in self._connections:
            connection.progress()
        return False

    def file_descriptors(self) -> Sequence[int]:
        """None: copies are done by the writer."""
        return ()

    def arm(self) -> bool:
        """Always ready to sleep: `progress` leaves nothing behind."""
        return True

    def close(self) -> None:
        """Close all connections and inlets."""
        for connection in self._connections:
            connection.close()
        for inlet in self._inlets:
            inlet.close()
