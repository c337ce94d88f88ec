"""A CUDA device: events, memory and graphs through torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from twostroke.engine.cuda_pool import allocate_pool
from twostroke.engine.device.contract import CapturedStep
from twostroke.engine.interfaces import QueuedWork

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels and lets libraries take their workspaces, neither of which may
happen inside one."""


class CudaDevice:
    """One GPU; see `GraphDevice`.

    Args:
        torch_device: Which one, with its index.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        # One pool for all graphs: they never run at the same time, so they can share the memory of what they make.
        self._pool: Any = None

    def event(self) -> QueuedWork:
        """See `GraphDevice.event`."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no types for it
        event.record(torch.cuda.current_stream(self.torch_device))
        return _Event(event)

    def free_memory(self) -> int:
        """See `GraphDevice.free_memory`; first gives back to the driver what torch keeps for later."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `GraphDevice.allocate`."""
        return allocate_pool(nbytes, self.torch_device)

    def peak_memory(self, run: Callable[[], object]) -> int:
        """See `GraphDevice.peak_memory`."""
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def capture(self, step: Callable[[], torch.Tensor], static: Sequence[torch.Tensor]) -> CapturedStep:
        """See `GraphDevice.capture`."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.torch_device)
        beside: Any = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call] # likewise
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        return _Graph(graph, output, static)


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def reached(self) -> bool:
        """See `QueuedWork.reached`."""
        return bool(self._event.query())


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, static: Sequence[torch.Tensor]) -> None:
        self._graph = graph
        self._static = static  # the graph knows only addresses: this keeps the memory
        self.output = output

    def replay(self) -> None:
        """See `CapturedStep.replay`."""
        self._graph.replay()
