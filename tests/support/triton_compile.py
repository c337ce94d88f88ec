"""Compiles Triton kernels for a GPU that is not there, through the very calls that would launch them.

Tests run kernels under Triton's interpreter, which must be chosen before Triton is imported; so compiling needs a
process of its own. A module beside the test names the launches, and its `main` hands them to `report_launches`:

    if __name__ == "__main__":
        report_launches({"float16, head_dim 64": lambda: write_kv(...)})

The test runs that module with `compile_launches("tests.engine.kernels.name_of_the_module")`. A launch runs the
project's own code with tensors in CPU memory; only the last step, the start on the device, is left out. So the
signature, the constants, the number of warps and of stages and the grid are those of production.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

COMPUTE_CAPABILITY = 90
"""Hopper: H100, H200."""
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that one block of threads may have on Hopper."""
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
"""Programs of a launch along x, y and z."""
DEADLINE_SECONDS = 110.0

_ELF = b"\x7fELF"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class CompiledKernel(msgspec.Struct, frozen=True):
    """What became of one kernel of one launch.

    Attributes:
        launch: Label of the launch, as in `report_launches`.
        kernel: Name of the kernel.
        grid: Programs along x, y and z.
        cubin_bytes: Size of the binary for the GPU.
        shared_bytes: Shared memory of a block of threads.
        registers: Registers of a thread.
        spilled_bytes: Memory of a thread for what does not fit into registers; 0 in a fast kernel.
        matrix_units: Whether it uses tensor cores.
    """

    launch: str
    kernel: str
    grid: tuple[int, int, int]
    cubin_bytes: int
    shared_bytes: int
    registers: int
    spilled_bytes: int
    matrix_units: bool


class _AbsentGPU:
    """Stands for the driver of one GPU, as far as compiling asks for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", COMPUTE_CAPABILITY, 32)


def compile_launches(module: str, *arguments: str, deadline: float = DEADLINE_SECONDS) -> list[CompiledKernel]:
    """Run `module` without the interpreter, and return what its `report_launches` reported.

    Args:
        module: Its dotted name.
        arguments: For its command line.
        deadline: Seconds that it gets.

    Raises:
        AssertionError: It failed; with its output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
        )
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return msgspec.json.decode(done.stdout, type=list[CompiledKernel])


def report_launches(launches: Mapping[str, Callable[[], object]]) -> None:
    """Make each launch, compiling its kernels and starting none, and print them as JSON for `compile_launches`."""
    triton.runtime.driver.set_active(_AbsentGPU())
    start = JITFunction.run
    reports: list[CompiledKernel] = []
    label = ""

    def compile_only(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        compiled = start(self, *args, grid=grid, warmup=True, **options)
        x, y, z = (*grid, 1, 1)[:3]
        reports.append(_describe(label, (x, y, z), compiled))

    JITFunction.run = compile_only
    try:
        for label, launch in launches.items():  # noqa: B007 - `compile_only` reads it
            launch()
    finally:
        JITFunction.run = start
    sys.stdout.write(json.dumps(msgspec.to_builtins(reports)))


def _describe(launch: str, grid: tuple[int, int, int], compiled: Any) -> CompiledKernel:
    binary: bytes = compiled.asm["cubin"]
    if not binary.startswith(_ELF):
        raise ValueError(f"{launch}: what the compiler made begins with {binary[:4]!r}, which is no ELF file")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    found = _USAGE.search(usage)
    if found is None:
        raise ValueError(f"{launch}: cuobjdump says nothing of registers: {usage!r}")
    registers, stack, local = map(int, found.groups())
    return CompiledKernel(
        launch=launch,
        kernel=compiled.metadata.name,
        grid=grid,
        cubin_bytes=len(binary),
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spilled_bytes=stack + local,
        matrix_units="mma" in compiled.asm["ptx"],
    )
