"""The part of UCX's C interface (UCP 1.17 and later) that a transfer needs, through ctypes.

ucxx's Python offers messages but no one-sided calls, so the few that are needed are declared here against
`ucp/api/ucp.h`: contexts, workers, endpoints, memory registration, put and flush. Structures are declared in
full, since UCX reads the fields that `field_mask` names at their C offsets; a test compares offsets with the header's.
No Python callback is ever handed to UCX: requests are polled.

Every function here must be called from one thread at a time.
"""

import ctypes
from collections.abc import Callable
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)

from kvtransfer.backend import BackendError, MemoryKind

API_MAJOR, API_MINOR = 1, 17
STATUS = c_int8
"""`ucs_status_t` is a packed enum of one byte; read as an int, an error would look like a positive number."""
STATUS_OK = 0
STATUS_IN_PROGRESS = 1
STATUS_BUSY = -15
POINTERS = 1 << 64
LAST_ERROR = -100
"""Pointers whose signed value lies in [LAST_ERROR, -1] are status codes (`UCS_PTR_IS_ERR`)."""

FEATURE_RMA = 1 << 1
FEATURE_WAKEUP = 1 << 4
CONTEXT_FIELD_FEATURES = 1 << 0
WORKER_FIELD_THREAD_MODE = 1 << 0
THREAD_MODE_SINGLE = 0
ENDPOINT_FIELD_REMOTE_ADDRESS = 1 << 0
MEMORY_FIELD_ADDRESS = 1 << 0
MEMORY_FIELD_LENGTH = 1 << 1
MEMORY_FIELD_TYPE = 1 << 4
MEMORY_TYPES = {MemoryKind.HOST: 0, MemoryKind.CUDA: 1}
"""`ucs_memory_type_t`."""
OPERATION_FIELD_MEMORY_HANDLE = 1 << 8


Put = Callable[[int, int, int], int | None]
"""See `Ucp.putter`."""


class ContextParams(Structure):
    """`ucp_params_t`."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(Structure):
    """`ucp_worker_params_t`."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class EndpointParams(Structure):
    """`ucp_ep_params_t`; `err_handler` and `sockaddr` are structures in place."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_handler_cb", c_void_p),
        ("err_handler_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr_addr", c_void_p),
        ("sockaddr_addrlen", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr_addr", c_void_p),
        ("local_sockaddr_addrlen", c_uint32),
    )


class MemoryMapParams(Structure):
    """`ucp_mem_map_params_t`."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    )


class OperationParams(Structure):
    """`ucp_request_param_t`; `cb` and `recv_info` are unions of pointers."""

    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


class Ucp:
    """The functions of one loaded `libucp`, with argument types, and status codes turned into errors.

    Args:
        library: The `libucp.so.0` that the Python binding has loaded. A second copy must never be loaded beside it.
    """

    def __init__(self, library: CDLL) -> None:
        self._lib = library
        self._declare()

    def _declare(self) -> None:
        """Declare arguments and results as in `ucp.h`; handles are plain pointers."""
        handle, text, size = c_void_p, c_char_p, c_size_t
        signatures: dict[str, tuple[object, list[object]]] = {
            "ucs_status_string": (text, [STATUS]),
            "ucp_get_version_string": (text, []),
            "ucp_config_read": (STATUS, [text, text, POINTER(handle)]),
            "ucp_config_modify": (STATUS, [handle, text, text]),
            "ucp_config_release": (None, [handle]),
            "ucp_init_version": (STATUS, [c_uint, c_uint, POINTER(ContextParams), handle, POINTER(handle)]),
            "ucp_cleanup": (None, [handle]),
            "ucp_worker_create": (STATUS, [handle, POINTER(WorkerParams), POINTER(handle)]),
            "ucp_worker_destroy": (None, [handle]),
            "ucp_worker_get_address": (STATUS, [handle, POINTER(handle), POINTER(size)]),
            "ucp_worker_release_address": (None, [handle, handle]),
            "ucp_worker_get_efd": (STATUS, [handle, POINTER(c_int)]),
            "ucp_worker_arm": (STATUS, [handle]),
            "ucp_worker_progress": (c_uint, [handle]),
            "ucp_mem_map": (STATUS, [handle, POINTER(MemoryMapParams), POINTER(handle)]),
            "ucp_mem_unmap": (STATUS, [handle, handle]),
            "ucp_rkey_pack": (STATUS, [handle, handle, POINTER(handle), POINTER(size)]),
            "ucp_rkey_buffer_release": (None, [handle]),
            "ucp_ep_create": (STATUS, [handle, POINTER(EndpointParams), POINTER(handle)]),
            "ucp_ep_rkey_unpack": (STATUS, [handle, text, POINTER(handle)]),
            "ucp_rkey_destroy": (None, [handle]),
            "ucp_put_nbx": (handle, [handle, handle, size, c_uint64, handle, POINTER(OperationParams)]),
            "ucp_ep_flush_nbx": (handle, [handle, POINTER(OperationParams)]),
            "ucp_request_check_status": (STATUS, [handle]),
            "ucp_request_free": (None, [handle]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments

    def version(self) -> str:
        """UCX's own version, such as `1.21.0`."""
        text: bytes = self._lib.ucp_get_version_string()
        return text.decode()

    def status_text(self, status: int) -> str:
        """UCX's own words for `status`, with the number."""
        return f"{self._lib.ucs_status_string(status).decode()} ({status})"

    def _check(self, status: int, what: str) -> None:
        if status != STATUS_OK:
            raise BackendError(f"UCX could not {what}: {self.status_text(status)}")

    def create_context(self, options: dict[str, str]) -> int:
        """A context for one-sided operations with wake-ups; `options` override `UCX_*` of the environment.

        Raises:
            BackendError: An option is unknown, or no transport is left.
        """
        config, context = c_void_p(), c_void_p()
        self._check(self._lib.ucp_config_read(None, None, byref(config)), "read its configuration")
        try:
            for name, value in options.items():
                status = self._lib.ucp_config_modify(config, name.encode(), value.encode())
                self._check(status, f"set {name}={value}")
            params = ContextParams(field_mask=CONTEXT_FIELD_FEATURES, features=FEATURE_RMA | FEATURE_WAKEUP)
            status = self._lib.ucp_init_version(API_MAJOR, API_MINOR, byref(params), config, byref(context))
            self._check(status, f"start with {options}")
        finally:
            self._lib.ucp_config_release(config)
        return _pointer(context)

    def destroy_context(self, context: int) -> None:
        """Free a context without workers or registered memory."""
        self._lib.ucp_cleanup(context)

    def create_worker(self, context: int) -> int:
        """A worker: its own endpoints, listening port and wake-up descriptor."""
        worker = c_void_p()
        params = WorkerParams(field_mask=WORKER_FIELD_THREAD_MODE, thread_mode=THREAD_MODE_SINGLE)
        self._check(self._lib.ucp_worker_create(context, byref(params), byref(worker)), "create a worker")
        return _pointer(worker)

    def destroy_worker(self, worker: int) -> None:
        """Close all endpoints of a worker and free it; operations in flight are dropped."""
        self._lib.ucp_worker_destroy(worker)

    def worker_address(self, worker: int) -> bytes:
        """What a peer needs to connect to `worker`."""
        address, length = c_void_p(), c_size_t()
        status = self._lib.ucp_worker_get_address(worker, byref(address), byref(length))
        self._check(status, "tell a worker's address")
        try:
            return ctypes.string_at(_pointer(address), length.value)
        finally:
            self._lib.ucp_worker_release_address(worker, address)

    def worker_fd(self, worker: int) -> int:
        """A descriptor, owned by the worker, that becomes readable after a successful `arm`."""
        fd = c_int()
        self._check(self._lib.ucp_worker_get_efd(worker, byref(fd)), "give a worker's descriptor")
        return fd.value

    def arm(self, worker: int) -> bool:
        """Prepare to sleep. False: events wait already, progress first."""
        status = self._lib.ucp_worker_arm(worker)
        if status == STATUS_BUSY:
            return False
        self._check(status, "arm a worker")
        return True

    def progress(self, worker: int) -> bool:
        """Let a worker send, receive and complete; True if anything moved."""
        return bool(self._lib.ucp_worker_progress(worker))

    def map_memory(self, context: int, address: int, nbytes: int, kind: MemoryKind) -> int:
        """Register memory for puts from and into it; a memory handle.

        Its kind is said, not detected: a wrong guess would have the CPU read memory of a GPU.
        """
        handle = c_void_p()
        fields = MEMORY_FIELD_ADDRESS | MEMORY_FIELD_LENGTH | MEMORY_FIELD_TYPE
        params = MemoryMapParams(field_mask=fields, address=address, length=nbytes, memory_type=MEMORY_TYPES[kind])
        status = self._lib.ucp_mem_map(context, byref(params), byref(handle))
        self._check(status, f"register {nbytes} bytes of {kind} memory at {address:#x}")
        return _pointer(handle)

    def unmap_memory(self, context: int, memory: int) -> None:
        """Undo `map_memory`."""
        self._check(self._lib.ucp_mem_unmap(context, memory), "release registered memory")

    def pack_key(self, context: int, memory: int) -> bytes:
        """The right to write registered memory, in wire form."""
        buffer, length = c_void_p(), c_size_t()
        status = self._lib.ucp_rkey_pack(context, memory, byref(buffer), byref(length))
        self._check(status, "pack a memory key")
        try:
            return ctypes.string_at(_pointer(buffer), length.value)
        finally:
            self._lib.ucp_rkey_buffer_release(buffer)

    def create_endpoint(self, worker: int, address: bytes) -> int:
        """An endpoint towards the worker with `address`; error handling off, so that all transports qualify."""
        endpoint = c_void_p()
        params = EndpointParams(field_mask=ENDPOINT_FIELD_REMOTE_ADDRESS, address=address)
        status = self._lib.ucp_ep_create(worker, byref(params), byref(endpoint))
        self._check(status, "create an endpoint")
        return _pointer(endpoint)

    def unpack_key(self, endpoint: int, key: bytes) -> int:
        """A peer's packed key, usable on `endpoint`."""
        handle = c_void_p()
        self._check(self._lib.ucp_ep_rkey_unpack(endpoint, key, byref(handle)), "read the peer's memory key")
        return _pointer(handle)

    def destroy_key(self, key: int) -> None:
        """Free an unpacked key."""
        self._lib.ucp_rkey_destroy(key)

    def putter(self, endpoint: int, key: int, memory: int) -> Put:
        """The puts of one endpoint, with the peer's `key` and our `memory` handle.

        What all of them share is made once: a put of a small block takes about as long as its arguments.

        Returns:
            A function of local address, remote address and bytes. It starts a put, and returns None if that is complete
            already, else a request to check and free; `BackendError` if UCX refused.
        """
        params = OperationParams(op_attr_mask=OPERATION_FIELD_MEMORY_HANDLE, memh=memory)
        arguments, started, put_nbx = byref(params), self._started, self._lib.ucp_put_nbx

        def put(local: int, remote: int, nbytes: int) -> int | None:
            return started(put_nbx(endpoint, local, nbytes, remote, key, arguments), "put")

        return put

    def flush(self, endpoint: int) -> int | None:
        """Start a flush; None and errors as for `put`."""
        params = OperationParams()
        return self._started(self._lib.ucp_ep_flush_nbx(endpoint, byref(params)), "flush")

    def _started(self, pointer: int | None, what: str) -> int | None:
        if pointer is not None and pointer >= POINTERS + LAST_ERROR:
            raise BackendError(f"UCX could not {what}: {self.status_text(pointer - POINTERS)}")
        return pointer

    def request_status(self, request: int) -> int:
        """`STATUS_IN_PROGRESS`, `STATUS_OK`, or a negative error."""
        status: int = self._lib.ucp_request_check_status(request)
        return status

    def free_request(self, request: int) -> None:
        """Give a request back to UCX."""
        self._lib.ucp_request_free(request)


def _pointer(handle: c_void_p) -> int:
    if handle.value is None:
        raise BackendError("UCX returned a null handle with status OK; is this libucp of another major version?")
    return handle.value
