"""The pool of a GPU's KV memory: over a made-up driver here, over the real one where there is a GPU."""

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from twostroke.engine.cuda_pool import DriverPool, load_driver
from twostroke.protocol.errors import ConfigError

OUT_OF_MEMORY = 2
ON_A_GPU = """
import torch
from twostroke.engine.cuda_pool import DriverPool, allocate_pool, load_driver
pool = allocate_pool(1 << 20, torch.device("cuda", 0))
assert pool.dtype == torch.uint8 and pool.shape == (1 << 20,) and not pool.any()
pool.view(torch.bfloat16).fill_(1.5)
assert pool.view(torch.bfloat16).sum().item() == 1.5 * (1 << 19)
assert DriverPool(1 << 20, load_driver()).ipc_capable
"""


class FakeDriver:
    """Hands out made-up addresses, and knows which are in use."""

    def __init__(self, *, room: int = 1 << 30, ipc_capable: bool = True) -> None:
        self.room = room
        self.ipc_capable = ipc_capable
        self.used: dict[int, int] = {}

    def cuMemAlloc_v2(self, address: Any, nbytes: int) -> int:  # noqa: N802  (the driver's name)
        """Refuses what does not fit."""
        if nbytes > self.room - sum(self.used.values()):
            return OUT_OF_MEMORY
        address._obj.value = 0x7F00_0000_0000 + (len(self.used) << 32)
        self.used[address._obj.value] = nbytes
        return 0

    def cuMemFree_v2(self, address: int) -> int:  # noqa: N802
        """Forgets it."""
        del self.used[address]
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: int) -> int:  # noqa: N802
        """Knows of one attribute."""
        assert attribute == 10
        assert address in self.used
        value._obj.value = int(self.ipc_capable)
        return 0


def test_a_pool_is_one_allocation_that_torch_can_wrap() -> None:
    """Writable bytes at the driver's address; freed with the pool."""
    driver = FakeDriver()
    pool = DriverPool(4096, driver)
    assert driver.used == {pool.address: 4096}
    assert pool.ipc_capable
    assert pool.__cuda_array_interface__ == {
        "shape": (4096,),
        "typestr": "|u1",
        "data": (pool.address, False),
        "version": 3,
    }
    del pool
    gc.collect()
    assert driver.used == {}


def test_a_driver_that_refuses_is_quoted() -> None:
    """With the size, its status, and what to lower."""
    with pytest.raises(ConfigError, match=r"refused 4096 bytes .* \(CUresult 2\); lower kv_cache.memory_fraction"):
        DriverPool(4096, FakeDriver(room=4095))


def test_memory_that_others_cannot_open_is_told_apart() -> None:
    """Its blocks would be staged."""
    assert not DriverPool(4096, FakeDriver(ipc_capable=False)).ipc_capable


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there")
def test_without_a_driver_the_reason_is_said() -> None:
    """A host without GPU."""
    with pytest.raises(ConfigError, match=r"driver cannot be loaded: libcuda.so.1"):
        load_driver()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", ["expandable_segments:False", "expandable_segments:True"])
def test_on_a_gpu_the_pool_can_be_opened_by_others_whatever_torch_allocates_from(setting: str) -> None:
    """Torch's own memory could not, with expandable segments."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting}
    subprocess.run([sys.executable, "-c", ON_A_GPU], check=True, timeout=100, env=environment)
