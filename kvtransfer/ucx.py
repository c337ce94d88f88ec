"""The UCX transport: one-sided puts, by whichever of the `transports` UCX finds fastest.

    context (`ucp_context_h`)       one an agent; owns the registered buffer
      worker (`ucp_worker_h`)       one an inlet and one a connection, never shared between peers
        endpoint (`ucp_ep_h`)       a connection's way to one inlet

Destroying a worker closes its sockets and drops what is in flight, without asking the peer. Over tcp the target moves
received bytes into its memory itself, in `progress`, so a destroyed worker is proof that its peer writes no more. Error
handling of UCX is off (it rules out shared memory and is slow over tcp): a dead peer shows as a failed operation, or
not at all, which the control messages notice.
"""

import structlog

from kvtransfer.backend import Backend, BackendError, BlockBuffer, Connection, Inlet, Operation, OperationState
from kvtransfer.transports import Transports
from kvtransfer.ucp import STATUS_IN_PROGRESS, STATUS_OK, Ucp
from kvtransfer.ucx_binding import load_ucp

log = structlog.get_logger(__name__)

_PROGRESS_ROUNDS = 64
"""Rounds of `ucp_worker_progress` before control messages get their turn."""


class UcxOperation(Operation):
    """A UCX request, freed as soon as it is seen to be complete; None stands for one that completed at once."""

    __slots__ = ("_request", "_status", "_ucp")

    def __init__(self, ucp: Ucp, request: int | None) -> None:
        self._ucp = ucp
        self._request = request
        self._status = STATUS_OK if request is None else STATUS_IN_PROGRESS

    def poll(self) -> OperationState:
        """Where it stands, by asking UCX."""
        if self._request is not None:
            self._status = self._ucp.request_status(self._request)
            if self._status != STATUS_IN_PROGRESS:
                self._ucp.free_request(self._request)
                self._request = None
        if self._status == STATUS_IN_PROGRESS:
            return OperationState.PENDING
        return OperationState.COMPLETE if self._status == STATUS_OK else OperationState.FAILED

    @property
    def error(self) -> str:
        """UCX's words for the failure."""
        return self._ucp.status_text(self._status) if self._status < 0 else ""


class UcxWorker:
    """One UCX worker with its wake-up descriptor."""

    def __init__(self, ucp: Ucp, context: int) -> None:
        self.ucp = ucp
        self.handle = ucp.create_worker(context)
        self.fd = ucp.worker_fd(self.handle)

    def progress(self) -> bool:
        """Work until nothing moves, for a bounded number of rounds; True if the bound came first.

        Arming a worker that is not drained loses wake-ups: its descriptor reports new events alone.
        """
        progress, handle = self.ucp.progress, self.handle
        for _ in range(_PROGRESS_ROUNDS):  # noqa: SIM110 - the most frequent loop of a transfer; `all` takes longer
            if not progress(handle):
                return False
        return True

    def destroy(self) -> None:
        """Close its sockets and free it."""
        self.ucp.destroy_worker(self.handle)


class UcxConnection(Connection):
    """An endpoint on a worker of its own."""

    def __init__(self, backend: "UcxBackend", address: bytes, key: bytes) -> None:
        self._backend = backend
        self._worker: UcxWorker | None = backend.add_worker()
        ucp = self._ucp = self._worker.ucp
        try:
            self._endpoint = ucp.create_endpoint(self._worker.handle, address)
            self._key = ucp.unpack_key(self._endpoint, key)
            self._put = ucp.putter(self._endpoint, self._key, backend.memory)
        except BackendError:
            backend.drop_worker(self._worker)
            raise

    def write(self, local_address: int, remote_address: int, nbytes: int) -> Operation:
        """Start a put."""
        self._check_open()
        return UcxOperation(self._ucp, self._put(local_address, remote_address, nbytes))

    def flush(self) -> Operation:
        """Start a flush of the endpoint."""
        self._check_open()
        return UcxOperation(self._ucp, self._ucp.flush(self._endpoint))

    def _check_open(self) -> None:
        if self._worker is None:
            raise BackendError("the UCX connection is closed")

    def close(self) -> None:
        """Destroy the worker; operations in flight must not be polled afterwards."""
        if self._worker is not None:
            self._ucp.destroy_key(self._key)
            self._backend.drop_worker(self._worker)
            self._worker = None


class UcxInlet(Inlet):
    """A worker that one peer connects to."""

    def __init__(self, backend: "UcxBackend", key: bytes) -> None:
        self._backend = backend
        self._worker: UcxWorker | None = backend.add_worker()
        self._address = self._worker.ucp.worker_address(self._worker.handle)
        self._key = key

    @property
    def address(self) -> bytes:
        """The worker's address."""
        return self._address

    @property
    def key(self) -> bytes:
        """The packed key of the registered buffer."""
        return self._key

    def close(self) -> None:
        """Destroy the worker and with it the peer's connection."""
        if self._worker is not None:
            self._backend.drop_worker(self._worker)
            self._worker = None


class UcxBackend(Backend):
    """UCX in one process.

    Args:
        transports: What UCX may choose from.
        net_devices: UCX's network devices; None: all.

    Raises:
        BackendError: No binding is installed, or UCX does not start with these settings.
    """

    def __init__(self, transports: Transports, net_devices: str | None) -> None:
        self._transports = transports
        options = {"TLS": ",".join(transports.names)}
        if net_devices is not None:
            options["NET_DEVICES"] = net_devices
        self._ucp = Ucp(load_ucp())
        self._context = self._ucp.create_context(options)
        self._workers: dict[int, UcxWorker] = {}
        self._memory: int | None = None
        self._key = b""
        log.info("ucx started", transports=options["TLS"], net_devices=net_devices or "all")

    @property
    def close_is_proof(self) -> bool:
        """False with cma or cuda_ipc: such a writer reaches into our memory by itself."""
        return self._transports.close_is_proof

    @property
    def memory(self) -> int:
        """UCX's handle of the registered buffer."""
        if self._memory is None:
            raise BackendError("register a buffer before connecting")
        return self._memory

    def register(self, buffer: BlockBuffer) -> None:
        """Map the buffer and pack its key."""
        self._memory = self._ucp.map_memory(self._context, buffer.address, buffer.nbytes, buffer.kind)
        self._key = self._ucp.pack_key(self._context, self._memory)

    def add_worker(self) -> UcxWorker:
        """A new worker that `progress` and `arm` care for."""
        worker = UcxWorker(self._ucp, self._context)
        self._workers[worker.handle] = worker
        return worker

    def drop_worker(self, worker: UcxWorker) -> None:
        """Destroy a worker."""
        del self._workers[worker.handle]
        worker.destroy()

    def open_inlet(self) -> Inlet:
        """A worker for one peer."""
        if not self._key:
            raise BackendError("register a buffer before opening an inlet")
        return UcxInlet(self, self._key)

    def connect(self, address: bytes, key: bytes) -> Connection:
        """An endpoint towards the peer's worker; UCX completes the connection in `progress`."""
        return UcxConnection(self, address, key)

    def progress(self) -> bool:
        """Progress all workers; True if one of them has not come to rest."""
        unrested = [worker.progress() for worker in self._workers.values()]  # all get their turn
        return any(unrested)

    def file_descriptors(self) -> list[int]:
        """The wake-up descriptors of all workers."""
        return [worker.fd for worker in self._workers.values()]

    def arm(self) -> bool:
        """Arm all workers; False as soon as one has work."""
        return all(self._ucp.arm(worker.handle) for worker in self._workers.values())

    def close(self) -> None:
        """Destroy all workers, unmap the buffer, end the context."""
        for worker in list(self._workers.values()):
            self.drop_worker(worker)
        if self._memory is not None:
            self._ucp.unmap_memory(self._context, self._memory)
            self._memory = None
        self._ucp.destroy_context(self._context)
