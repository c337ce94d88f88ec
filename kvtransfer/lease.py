"""One lease on the context side: its states and the only ways between them.

    OFFERED ---Reserve---> SERVING ---all written and flushed----------> ENDED(done)
       |                      |---connection broke---------------------> ENDED(failed)
       |                      |---cancel, revoke, silence, deadline
       |                      v
       |                   STOPPING ---nothing in flight---------------> ENDED(cancelled, failed, expired)
       |---revoke, expiry, a reservation of no blocks------------------> ENDED(cancelled, expired, done)

STOPPING issues no more writes and waits until none in flight touches the blocks.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.device import PASSED, StepFence
from kvtransfer.events import TransferOutcome
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import Reserve


class LeaseState(enum.Enum):
    """Where a lease stands."""

    OFFERED = enum.auto()
    SERVING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OFFERED: frozenset({LeaseState.SERVING, LeaseState.ENDED}),
    LeaseState.SERVING: frozenset({LeaseState.STOPPING, LeaseState.ENDED}),
    LeaseState.STOPPING: frozenset({LeaseState.ENDED}),
    LeaseState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a lease: one transfer of one generation worker, reachable by a route of the control socket."""

    route: bytes
    request: Reserve

    @property
    def name(self) -> tuple[int, int]:
        """(epoch of the generation worker, transfer id): unique."""
        return (self.request.epoch, self.request.transfer_id)


@dataclass(slots=True)
class Lease:
    """The right to read some blocks, until `deadline`.

    Attributes:
        key: The sequence.
        blocks: Its leased block numbers.
        offered: Monotonic time of its start.
        deadline: Monotonic time of the next forced move: expiry, end of serving, or end of stopping.
        fence: Its blocks hold what they should once this is reached.
        reader: The transfer that reads it; None before the first.
        outcome: How it ends, known from STOPPING on.
        reason: The same for people.
    """

    key: SequenceKey
    blocks: Sequence[int]
    offered: float
    deadline: float
    fence: StepFence = PASSED
    state: LeaseState = LeaseState.OFFERED
    reader: Reader | None = None
    outcome: TransferOutcome | None = None
    reason: str = ""

    def move(self, state: LeaseState) -> None:
        """Enter `state`.

        Raises:
            RuntimeError: The table does not allow it: a bug.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"lease {self.key} cannot go from {self.state.name} to {state.name}")
        self.state = state
