"""A bare loop of puts over UCX: what the transport gives to a Python program that does nothing else.

    target   PutTarget(memory)        -> `door`: address, key, base;  `progress` again and again
    source   PutSource(memory, door)  -> write(copies): put, put, ..., flush, progress until that is complete

No reservation, no bound of what is in flight (which cost speed where it was tried), no way to stop it: both sides spin.
It has its own declarations of the calls in its loop, so that it stays what it is when `kvtransfer` changes.
"""

import ctypes
from collections.abc import Sequence

import msgspec

from benchmarks.block_memory import BlockMemory
from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory
from kvtransfer.transports import allowed_transports
from kvtransfer.ucp import (
    OPERATION_FIELD_MEMORY_HANDLE,
    STATUS,
    STATUS_IN_PROGRESS,
    STATUS_OK,
    OperationParams,
    Ucp,
)
from kvtransfer.ucx_binding import load_ucp

_SPINS = 256


class Door(msgspec.Struct, frozen=True):
    """How a source reaches a target.

    Attributes:
        address: Of the target's UCX worker.
        key: The right to write its memory, packed.
        base: Address of its block 0.
    """

    address: bytes
    key: bytes
    base: int


class _End:
    """What both ends are made of: a UCX context with a worker, and the registered memory."""

    def __init__(self, memory: BlockMemory, shared_memory: SharedMemory) -> None:
        transports = ",".join(allowed_transports(MemoryKind.HOST, shared_memory).names)
        self._library = load_ucp()
        self._ucp = Ucp(self._library)
        self._context = self._ucp.create_context({"TLS": transports, "NET_DEVICES": "lo"})
        self._worker = self._ucp.create_worker(self._context)
        self._memory = memory
        self._handle = self._ucp.map_memory(self._context, memory.address, memory.nbytes, MemoryKind.HOST)


class PutTarget(_End):
    """The end that is written to."""

    def door(self) -> Door:
        """For the source."""
        address = self._ucp.worker_address(self._worker)
        return Door(address, self._ucp.pack_key(self._context, self._handle), self._memory.address)

    def progress(self) -> None:
        """Let UCX receive for a while; over tcp nothing arrives unless this is called."""
        progress, worker = self._library.ucp_worker_progress, self._worker
        for _ in range(_SPINS):
            progress(worker)


class PutSource(_End):
    """The end that writes."""

    def __init__(self, memory: BlockMemory, shared_memory: SharedMemory, door: Door) -> None:
        super().__init__(memory, shared_memory)
        self._base = door.base
        self._endpoint = self._ucp.create_endpoint(self._worker, door.address)
        self._key = self._ucp.unpack_key(self._endpoint, door.key)
        self._params = OperationParams(op_attr_mask=OPERATION_FIELD_MEMORY_HANDLE, memh=self._handle)
        self._no_params = OperationParams()
        handle = ctypes.c_void_p
        put = self._library.ucp_put_nbx
        put.restype = handle
        put.argtypes = [handle, handle, ctypes.c_size_t, ctypes.c_uint64, handle, handle]
        self._library.ucp_request_check_status.restype = STATUS

    def write(self, sources: Sequence[int], targets: Sequence[int], size: int) -> None:
        """Copy block `sources[i]` here to block `targets[i]` there, for every i; returns when all have landed.

        Args:
            sources: Block numbers here.
            targets: Block numbers there, as many.
            size: Bytes of a block.

        Raises:
            RuntimeError: UCX refused or failed.
        """
        here, there = self._memory.address, self._base
        copies = [(here + a * size, there + b * size) for a, b in zip(sources, targets, strict=True)]
        put, progress = self._library.ucp_put_nbx, self._library.ucp_worker_progress
        check, free = self._library.ucp_request_check_status, self._library.ucp_request_free
        endpoint, worker, key, params = self._endpoint, self._worker, self._key, ctypes.addressof(self._params)
        requests: list[int] = []
        for local, remote in copies:
            request = put(endpoint, local, size, remote, key, params)
            if request is not None:
                requests.append(_valid(request))
        flush = self._library.ucp_ep_flush_nbx(endpoint, ctypes.byref(self._no_params))
        if flush is not None:
            requests.append(_valid(flush))
            while check(flush) == STATUS_IN_PROGRESS:
                progress(worker)
        if any(check(request) != STATUS_OK for request in requests):
            raise RuntimeError("a put failed")
        for request in requests:
            free(request)


def _valid(request: int) -> int:
    signed = ctypes.c_int64(request).value
    if -100 <= signed < 0:
        raise RuntimeError(f"UCX refused with status {signed}")
    return request
