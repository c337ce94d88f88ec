"""A `GraphDevice` on the CPU that refuses what a GPU's graph could not replay.

While a step is captured, and each time it is replayed, every tensor that an operation is given must lie in static
memory or have been made by the step itself; nothing may ask for a value on the host or bring one from there. Kernels
under Triton's interpreter are seen too, since it passes their arguments through torch. A replay must do exactly what
was captured: the same operations over the same static memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtransfer.device import PASSED, StepFence

_aten = torch.ops.aten
_HOST_VALUES = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.nonzero_numpy.default,
    _aten.argwhere.default,
    _aten.where.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
    _aten.equal.default,
    _aten.allclose.default,
    _aten.lift_fresh.default,
}
"""Operations that wait for the device, or bring a value to it; some are made of others, but not in inference mode."""
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
"""Operations that count their result on the host where an index is a mask."""


class NotCapturableError(RuntimeError):
    """The step does something that a graph cannot replay; torch raises a `RuntimeError` for such steps too."""


@dataclass
class RecordingDevice:
    """See the module.

    Attributes:
        free_bytes: What `free_memory` says.
        peak_bytes: What `peak_memory` says.
        captured: The captured steps, in order.
    """

    free_bytes: int = 0
    peak_bytes: int = 0
    captured: list["RecordedStep"] = field(default_factory=list)
    torch_device = torch.device("cpu")

    def event(self) -> StepFence:
        """Reached already: on a CPU a step is over when it returns."""
        return PASSED

    def free_memory(self) -> int:
        """As told."""
        return self.free_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        """In the host's memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def peak_memory(self, run: Callable[[], object]) -> int:
        """As told, after a run."""
        run()
        return self.peak_bytes

    def capture(self, step: Callable[[], torch.Tensor], static: Sequence[torch.Tensor]) -> "RecordedStep":
        """Run the step under watch.

        Raises:
            NotCapturableError: It does what a graph cannot replay.
        """
        recorded = RecordedStep(step, {tensor.untyped_storage().data_ptr() for tensor in static})
        self.captured.append(recorded)
        return recorded


class RecordedStep:
    """A captured step: its replay runs it again, under the same watch.

    Args:
        step: The step.
        static: Addresses of the static memory.
    """

    def __init__(self, step: Callable[[], torch.Tensor], static: set[int]) -> None:
        self._step = step
        self._static = static
        self._trace, made = self._watch()
        self.output = made
        self.replays = 0

    def replay(self) -> None:
        """Run it again; the output stays where it is.

        Raises:
            NotCapturableError: It does something else than before.
        """
        trace, made = self._watch()
        if trace != self._trace:
            raise NotCapturableError(
                f"a replay made {len(trace)} operations, unlike the {len(self._trace)} captured ones"
            )
        self.output.copy_(made)
        self.replays += 1

    def _watch(self) -> tuple[list[tuple[str, tuple[int, ...]]], torch.Tensor]:
        with _Watch(self._static) as watch:
            output = self._step()
        return watch.trace, output


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Notes each operation and the static memory that it touches."""

    def __init__(self, static: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._static = static
        self._made: dict[int, torch.Tensor] = {}  # keeps them alive, so that no address comes twice
        self.trace: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        masked = func in _INDEXING and any(index.dtype is torch.bool for index in _tensors(args[1]))
        if masked or func in _HOST_VALUES:
            raise NotCapturableError(f"{func} needs the host while the step runs")
        touched = [self._check(func, tensor) for tensor in _tensors((args, kwargs))]
        self.trace.append((str(func), tuple(address for address in touched if address in self._static)))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._static:
                self._made[address] = tensor
        return result

    def _check(self, func: Any, tensor: torch.Tensor) -> int:
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and address not in self._static and address not in self._made:
            raise NotCapturableError(
                f"{func} is given a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, that is neither static nor "
                "made by the step"
            )
        return address


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
