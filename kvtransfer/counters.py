"""Numbers of a transfer agent, for metrics."""

import enum
from dataclasses import dataclass, field

from kvtransfer.events import TransferOutcome
from twostroke.protocol.durations import DurationHistogram, HandoverPart, HandoverTimes, copy_times

_WRITER_PARTS = (HandoverPart.LEASE_WAIT, HandoverPart.FIRST_PUT, HandoverPart.WRITE, HandoverPart.FLUSH)


def _writer_times() -> HandoverTimes:
    return {part: DurationHistogram() for part in _WRITER_PARTS}


class DropReason(enum.StrEnum):
    """Why a control message was dropped."""

    UNDECODABLE = "undecodable"
    STALE_EPOCH = "stale_epoch"
    BAD_MAC = "bad_mac"
    DUPLICATE = "duplicate"
    UNKNOWN_TRANSFER = "unknown_transfer"
    UNDELIVERABLE = "undeliverable"


@dataclass(slots=True)
class TransferCounters:
    """Counted by the transfer thread since its start, but for the gauges, which hold the present state.

    Attributes:
        leases: Ended leases by outcome.
        fetches: Ended fetches by outcome.
        bytes_written: Bytes whose write was started, context side.
        operations: Writes and flushes started, context side.
        leases_open: Gauge: leases that have not ended.
        fetches_open: Gauge: fetches that have not ended.
        quarantined: Gauge: transfers whose blocks the peer may still write.
        parked: Gauge: reservations that wait for their lease.
        dropped: Dropped messages by reason.
        times: How long the parts of a transfer took, context side.
    """

    leases: dict[TransferOutcome, int] = field(default_factory=lambda: dict.fromkeys(TransferOutcome, 0))
    fetches: dict[TransferOutcome, int] = field(default_factory=lambda: dict.fromkeys(TransferOutcome, 0))
    bytes_written: int = 0
    operations: int = 0
    leases_open: int = 0
    fetches_open: int = 0
    quarantined: int = 0
    parked: int = 0
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DropReason, 0))
    times: HandoverTimes = field(default_factory=_writer_times)

    def snapshot(self) -> "TransferCounters":
        """A copy for another thread. Keys never change, so it can be taken while the owner counts."""
        return TransferCounters(
            leases=dict(self.leases),
            fetches=dict(self.fetches),
            bytes_written=self.bytes_written,
            operations=self.operations,
            leases_open=self.leases_open,
            fetches_open=self.fetches_open,
            quarantined=self.quarantined,
            parked=self.parked,
            dropped=dict(self.dropped),
            times=copy_times(self.times),
        )
