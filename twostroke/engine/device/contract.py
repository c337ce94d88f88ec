"""What the engine asks of a device.

A decode step on a GPU is a few hundred short kernels, and starting them one by one takes longer than running them. So
the device captures the step once, and starts all of them with one call, again and again:

    captured = device.capture(step, static)      runs `step`, and notes every kernel with the addresses it was given
    (write the next step's numbers into the static buffers)
    captured.replay()                            the same kernels, over the same addresses
    captured.output                              read it before the next replay

A captured step may therefore touch only memory that stays where it is: the `static` tensors and what it makes itself.
It must not ask for a value on the host, nor bring one from there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from twostroke.engine.interfaces import QueuedWork


class CapturedStep(Protocol):
    """A step that can be run again.

    Attributes:
        output: What the step returned; each replay writes it anew.
    """

    output: torch.Tensor

    def replay(self) -> None:
        """Run the step once more over the same memory; returns when it is started."""
        ...


class GraphDevice(Protocol):
    """A device with memory of its own that can capture steps: a GPU.

    Attributes:
        torch_device: Where its tensors are.
    """

    torch_device: torch.device

    def event(self) -> QueuedWork:
        """The moment after all that the calling thread has started so far."""
        ...

    def free_memory(self) -> int:
        """Bytes that new tensors can take."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zero bytes, uint8 [nbytes], that other processes can be let into: the KV cache.

        Raises:
            ConfigError: The device refuses.
        """
        ...

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Run `run`; bytes that its tensors took at most, beyond those that were there before."""
        ...

    def capture(self, step: Callable[[], torch.Tensor], static: Sequence[torch.Tensor]) -> CapturedStep:
        """Capture `step`, which is run a few times for that.

        Args:
            step: What to capture; returns its output.
            static: All that it reads or writes, but for what it makes. Kept alive as long as the captured step.
        """
        ...
