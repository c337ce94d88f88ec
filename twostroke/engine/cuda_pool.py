"""KV memory of a GPU, taken from the driver instead of torch's allocator.

UCX registers the whole pool, and a peer on this host opens it by its IPC handle. Memory of torch's expandable segments
is mapped piece by piece and has no such handle: UCX would stage every block through the host, without a word. So the
pool is one allocation of the driver's own, whatever PYTORCH_CUDA_ALLOC_CONF says. It is freed with its last tensor.
"""

import ctypes
import weakref
from typing import Any, Protocol

import structlog
import torch

from twostroke.protocol.errors import ConfigError

log = structlog.get_logger(__name__)

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_IS_LEGACY_IPC_CAPABLE = 10
"""`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`."""


class Driver(Protocol):
    """The functions of CUDA's driver that a pool needs; each returns a `CUresult`."""

    def cuMemAlloc_v2(self, address: Any, nbytes: int) -> int:  # noqa: N802  (the driver's name)
        """Allocate in the current context; writes a `CUdeviceptr`."""
        ...

    def cuMemFree_v2(self, address: int) -> int:  # noqa: N802
        """Undo it."""
        ...

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: int) -> int:  # noqa: N802
        """Write one attribute of an address."""
        ...


class DriverPool:
    """One allocation of the driver's, as torch can wrap it.

    The GPU's primary context must be current on the calling thread.

    Args:
        nbytes: Its size.
        driver: CUDA's driver.

    Raises:
        ConfigError: The driver refuses.
    """

    def __init__(self, nbytes: int, driver: Driver) -> None:
        address = ctypes.c_uint64()
        status = driver.cuMemAlloc_v2(ctypes.byref(address), nbytes)
        if status != _SUCCESS:
            raise ConfigError(
                f"kv_cache: the CUDA driver refused {nbytes} bytes for the KV cache (CUresult {status}); lower "
                "kv_cache.memory_fraction or kv_cache.num_blocks, or end what else uses the GPU"
            )
        self.address = address.value
        self.nbytes = nbytes
        # The process's end frees it too, and the driver may be gone by then.
        weakref.finalize(self, driver.cuMemFree_v2, self.address).atexit = False
        capable = ctypes.c_int()
        status = driver.cuPointerGetAttribute(ctypes.byref(capable), _IS_LEGACY_IPC_CAPABLE, self.address)
        self.ipc_capable = status == _SUCCESS and bool(capable.value)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Bytes, in a row; see numba's CUDA Array Interface, version 3."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def allocate_pool(nbytes: int, device: torch.device) -> torch.Tensor:
    """`nbytes` zero bytes on `device`, outside torch's allocator.

    Raises:
        ConfigError: The driver refuses or is not there.
    """
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes the device's context current
    pool = DriverPool(nbytes, load_driver())
    if not pool.ipc_capable:
        log.warning("other processes cannot open this GPU's memory; KV blocks will be staged through the host")
    tensor = torch.as_tensor(pool, device=device)
    if tensor.data_ptr() != pool.address:
        raise ConfigError(
            f"kv_cache: torch copied the pool at {pool.address:#x} instead of wrapping it; is {device} it?"
        )
    return tensor.zero_()


def load_driver() -> Driver:
    """CUDA's driver, which torch has loaded.

    Raises:
        ConfigError: It is not there.
    """
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(f"device: CUDA's driver cannot be loaded: {error}") from error
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    driver: Driver = library
    return driver
