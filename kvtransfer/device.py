"""The seam to the device that computes the blocks: when a step's writes are there to be sent.

    engine thread                                  transfer thread
    queues a step on the device
    offer or fetch -> device.mark() -> fence       no write from these blocks, and no request to write into them,
                                                   until fence.reached()

A GPU computes behind the engine's back: when `offer` is called, the step that fills its blocks may only be queued. A
lease's fence keeps its blocks from being sent before they are written. A fetch's fence keeps a peer from writing into
blocks that a queued step may still use for a sequence that has left them. What was fetched needs no fence: `DONE` says
that it is in memory, so a step that is queued afterwards reads it.

Fences are polled, never waited for: the transfer thread serves other transfers meanwhile.
"""

from typing import Protocol


class StepFence(Protocol):
    """A point in the work of a device."""

    def reached(self) -> bool:
        """Whether everything queued before that point has ended. Never waits; once true, it stays true.

        Raises:
            Exception: The device failed; the transfer thread ends with it, since nothing is known of any block.
        """
        ...


class MemoryDevice(Protocol):
    """The device whose steps write and read the blocks."""

    def enter_thread(self) -> None:
        """Make the device current for the calling thread; the transfer thread does so before it starts UCX."""

    def mark(self) -> StepFence:
        """A fence behind everything that the calling thread has queued so far."""
        ...


class _Passed:
    """The fence of work that is over."""

    def reached(self) -> bool:
        """True."""
        return True


PASSED: StepFence = _Passed()
"""The fence of a device on which a step is over when it returns."""


class HostDevice:
    """The CPU: a step that has returned has written its blocks."""

    def enter_thread(self) -> None:
        """Nothing to do."""

    def mark(self) -> StepFence:
        """Everything is done already."""
        return PASSED
