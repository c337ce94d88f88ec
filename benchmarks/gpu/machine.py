"""Where a part runs and how it is timed: on a GPU, or in rehearsal on the CPU under Triton's interpreter.

A rehearsal runs the same code with tiny sizes, over the device of the tests, which checks that captured steps could be
captured. Its times mean nothing.
"""

import enum
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.engine.device.contract import CapturedStep, GraphDevice
from twostroke.engine.device.cuda import CudaDevice

_WARM_UPS = 3
_PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "GH200": 989.4, "H800": 989.4, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16 by the makers' data sheets."""
GIB = 1 << 30


class Mode(enum.StrEnum):
    """What a run is for."""

    MEASURE = "measure"
    REHEARSE = "rehearse"


@dataclass(frozen=True, slots=True)
class Machine:
    """See the module.

    Attributes:
        torch_device: Where tensors go.
        mode: Whether it is a GPU.
    """

    torch_device: torch.device
    mode: Mode

    @property
    def rehearses(self) -> bool:
        """Whether sizes must be tiny."""
        return self.mode is Mode.REHEARSE

    def open_device(self) -> GraphDevice:
        """The engine's seam, anew: torch refuses to capture into a graph pool whose earlier graphs are all gone."""
        if not self.rehearses:
            return CudaDevice(self.torch_device)
        from tests.support.recording_device import RecordingDevice  # noqa: PLC0415 - the rehearsal alone needs it

        return RecordingDevice()

    def wait(self) -> None:
        """Until all that was started has ended."""
        if not self.rehearses:
            torch.cuda.synchronize(self.torch_device)

    def times_s(self, run: Callable[[], object], rounds: int, repeats: int = 1) -> list[float]:
        """Seconds of device time of one `run`, for each of `rounds` rounds of `repeats` calls in a row."""
        rounds, repeats = (1, 1) if self.rehearses else (rounds, repeats)
        for _ in range(1 if self.rehearses else _WARM_UPS):
            run()
        self.wait()
        return [self._round_s(run, repeats) / repeats for _ in range(rounds)]

    def wall_s(self, run: Callable[[], object], rounds: int) -> list[float]:
        """Seconds from each call of `run` until all that it started has ended."""
        rounds = 1 if self.rehearses else rounds
        for _ in range(1 if self.rehearses else _WARM_UPS):
            run()
        times = []
        for _ in range(rounds):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return times

    def capture(self, step: Callable[[], torch.Tensor], static: Sequence[torch.Tensor]) -> CapturedStep:
        """A graph of `step`; see `GraphDevice.capture`."""
        with torch.inference_mode():
            return self.open_device().capture(step, static)

    def copy_gb_per_s(self) -> float:
        """GB/s of a copy within the device, counting bytes read and bytes written."""
        nbytes = 1 << 16 if self.rehearses else 4 * GIB
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source)
        return 2 * nbytes / statistics.median(self.times_s(lambda: target.copy_(source), 5, 5)) / 1e9

    def matmul_tflops(self) -> float:
        """TFLOP/s of a bfloat16 matrix product of random numbers, 8192 x 8192 x 8192."""
        size = 64 if self.rehearses else 8192
        left, right = (torch.randn(size, size, device=self.torch_device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        return 2 * size**3 / statistics.median(self.times_s(lambda: torch.matmul(left, right, out=out), 5, 5)) / 1e12

    def peak_tflops(self) -> float | None:
        """Of bfloat16 matrix products by the maker's data sheet; None for a GPU that is not listed here."""
        if self.rehearses:
            return 1.0
        name = torch.cuda.get_device_name(self.torch_device)
        return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)

    def _round_s(self, run: Callable[[], object], repeats: int) -> float:
        if self.rehearses:
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            return time.perf_counter() - start
        begin, end = (_timer() for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def open_machine(mode: Mode) -> Machine:
    """The current GPU; in rehearsal the CPU.

    Raises:
        RuntimeError: There is no GPU.
    """
    if mode is Mode.REHEARSE:
        return Machine(torch.device("cpu"), mode)
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU; --rehearse runs everything on the CPU")
    return Machine(torch.device("cuda", torch.cuda.current_device()), mode)


def _timer() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types for it
