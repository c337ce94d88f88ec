"""What the transfer agent tells the engine thread: how leases and transfers ended, and when blocks may be reused."""

import enum
from dataclasses import dataclass

from twostroke.protocol.ids import SequenceKey


class TransferOutcome(enum.StrEnum):
    """How a lease or a transfer ended; exactly one of these, on both sides."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Context side: nothing reads the leased blocks any more. Exactly one for each `offer`."""

    key: SequenceKey
    outcome: TransferOutcome


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Generation side: the transfer is over. Exactly one for each `fetch`.

    Attributes:
        transfer_id: The transfer.
        outcome: `DONE` alone means that all blocks hold what was asked for.
        blocks_safe: False: the peer may still write; keep the blocks until `BlocksSafe`.
        count: Blocks that arrived, for `DONE`; else 0.
        reason: For people, unless done.
    """

    transfer_id: int
    outcome: TransferOutcome
    blocks_safe: bool
    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlocksSafe:
    """Generation side: it is proven that the peer no longer writes the blocks of this transfer."""

    transfer_id: int


TransferEvent = LeaseEnded | FetchEnded | BlocksSafe
