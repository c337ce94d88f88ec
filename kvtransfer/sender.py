"""The context side's protocol, without I/O: what each message, timer and transport result does to which lease.

Every method takes the present monotonic time, changes state, and returns the actions that the caller must carry out, in
order. `lease` draws the states. Messages may come in any order: a reservation whose lease is not known yet is parked
until a deadline; a message about something ended meets a tombstone and is dropped or answered from it.

What `Stopped` promises to the generation side: CANCELLED and EXPIRED are sent once everything written has also landed,
the other reasons but FAILED before anything was written. FAILED is sent when the connection broke: bytes may still be
under way, so the generation side closes its inlet before it reuses the blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.device import PASSED, StepFence
from kvtransfer.events import LeaseEnded, TransferOutcome
from kvtransfer.lease import Lease, LeaseState, Reader
from kvtransfer.options import TransferLimits, TransferTimeouts
from kvtransfer.reservation import (
    ContextTerms,
    Copies,
    ForgedHandleError,
    ReservationError,
    StaleEpochError,
    check_reservation,
)
from kvtransfer.tombstones import Tombstones
from twostroke.ipc.pauses import OwnPauses
from twostroke.protocol.durations import HandoverPart
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.tokens import token_count
from twostroke.protocol.transfer import (
    Cancel,
    Done,
    Ping,
    Pong,
    Reserve,
    Stopped,
    StopReason,
    ToContext,
    ToGeneration,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` to the generation worker at `route`."""

    route: bytes
    message: ToGeneration


@dataclass(frozen=True, slots=True)
class StartWriting:
    """Once `fence` is reached, connect to the reader if needed, write, flush; then report `written` or `failed`."""

    key: SequenceKey
    request: Reserve
    leased: Sequence[int]
    copies: Copies
    fence: StepFence


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Issue no more for this lease; flush what is under way; then report `stopped` or `failed`."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class BreakConnection:
    """Close the connection that serves this lease at once, and report every lease on it as `failed`."""

    key: SequenceKey
    reason: str


ContextAction = Reply | StartWriting | StopWriting | BreakConnection | LeaseEnded

_STOP_REASONS = {
    TransferOutcome.FAILED: StopReason.FAILED,
    TransferOutcome.CANCELLED: StopReason.CANCELLED,
    TransferOutcome.EXPIRED: StopReason.EXPIRED,
}


@dataclass(frozen=True, slots=True)
class _Parked:
    reader: Reader
    copies: Copies
    deadline: float


class LeaseBook:
    """All leases of one context worker.

    Args:
        terms: What a reservation must match.
        timeouts: Durations.
        limits: Bounds.
        counters: Counted into; gauges are the caller's.
    """

    def __init__(
        self,
        terms: ContextTerms,
        timeouts: TransferTimeouts,
        limits: TransferLimits,
        counters: TransferCounters,
    ) -> None:
        self._terms = terms
        self._timeouts = timeouts
        self._limits = limits
        self._counters = counters
        self._leases: dict[SequenceKey, Lease] = {}
        self._serving: dict[tuple[int, int], SequenceKey] = {}
        self._parked: dict[SequenceKey, _Parked] = {}
        self._heard: dict[int, float] = {}
        self._pauses = OwnPauses(timeouts.silence_s)
        self._ended_leases: Tombstones[SequenceKey, StopReason] = Tombstones(limits.tombstones)
        self._ended_transfers: Tombstones[tuple[int, int], bool] = Tombstones(limits.tombstones)

    @property
    def open_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def parked(self) -> int:
        """Reservations that wait for their lease."""
        return len(self._parked)

    def state_of(self, key: SequenceKey) -> LeaseState:
        """Where the lease stands; `ENDED` also for one never offered."""
        lease = self._leases.get(key)
        return lease.state if lease else LeaseState.ENDED

    def offer(
        self, key: SequenceKey, blocks: Sequence[int], expiry_s: float, now: float, fence: StepFence = PASSED
    ) -> list[ContextAction]:
        """A lease starts; a reservation that was parked for it is served at once, or when `fence` is reached.

        Raises:
            ValueError: The key has an open lease already.
        """
        if key in self._leases:
            raise ValueError(f"sequence {key} has an open lease already")
        lease = self._leases[key] = Lease(key, blocks, now, now + expiry_s, fence)
        parked = self._parked.pop(key, None)
        return self._serve(lease, parked.reader, parked.copies, now) if parked else []

    def revoke(self, key: SequenceKey, now: float) -> list[ContextAction]:
        """The engine gives the lease up. Nothing happens if it has ended or is ending."""
        lease = self._leases.get(key)
        if lease is None or lease.state is LeaseState.STOPPING:
            return []
        return self._give_up(lease, TransferOutcome.CANCELLED, "the context worker gave the request up", now)

    def revoke_all(self, now: float) -> list[ContextAction]:
        """Give every lease up: the worker shuts down."""
        return [action for key in list(self._leases) for action in self.revoke(key, now)]

    def receive(self, route: bytes, message: ToContext, now: float) -> list[ContextAction]:
        """A generation worker's message."""
        if message.epoch in self._heard:
            self._heard[message.epoch] = now
        match message:
            case Ping():
                return [Reply(route, Pong(self._terms.epoch))]
            case Cancel():
                return self._cancel(route, message, now)
            case Reserve():
                return self._reserve(Reader(route, message), now)

    def written(self, key: SequenceKey) -> list[ContextAction]:
        """All blocks of the lease were written and have landed."""
        lease = self._leases[key]
        reader = _reader(lease)
        count = token_count(reader.request.blocks)
        done = Done(reader.request.transfer_id, self._terms.epoch, count)
        return [Reply(reader.route, done), *self._end(lease, TransferOutcome.DONE)]

    def stopped(self, key: SequenceKey) -> list[ContextAction]:
        """After `StopWriting`: nothing is under way any more, and what was written has landed."""
        lease = self._leases[key]
        outcome = lease.outcome or TransferOutcome.FAILED
        return [self._say_stopped(lease, _STOP_REASONS[outcome]), *self._end(lease, outcome)]

    def failed(self, key: SequenceKey, reason: str) -> list[ContextAction]:
        """The connection that served the lease is closed; nothing reads its blocks any more."""
        lease = self._leases[key]
        lease.reason = lease.reason or reason
        outcome = lease.outcome or TransferOutcome.FAILED
        return [self._say_stopped(lease, StopReason.FAILED), *self._end(lease, outcome)]

    def tick(self, now: float) -> list[ContextAction]:
        """Whatever is due by now."""
        actions: list[ContextAction] = []
        if pause_s := self._pauses.look(now):
            self._heard = {epoch: min(now, heard + pause_s) for epoch, heard in self._heard.items()}
        for lease in list(self._leases.values()):
            actions += self._overdue(lease, now)
        for key, parked in list(self._parked.items()):
            if now >= parked.deadline:
                del self._parked[key]
                actions.append(self._turn_away(parked.reader, StopReason.UNKNOWN_LEASE, f"no lease {key}"))
        return actions

    def _overdue(self, lease: Lease, now: float) -> list[ContextAction]:
        if lease.state is LeaseState.STOPPING:
            reason = f"operations still in flight {self._timeouts.stop_s} s after: {lease.reason}"
            return [BreakConnection(lease.key, reason)] if now >= lease.deadline else []
        if now >= lease.deadline:
            return self._give_up(lease, TransferOutcome.EXPIRED, "the lease's time is up", now)
        if lease.reader and now - self._heard[lease.reader.request.epoch] >= self._timeouts.silence_s:
            reason = f"the generation worker was silent for {self._timeouts.silence_s} s"
            return self._give_up(lease, TransferOutcome.FAILED, reason, now)
        return []

    def _reserve(self, reader: Reader, now: float) -> list[ContextAction]:
        request = reader.request
        key = request.handle.key
        if reader.name in self._serving or self._ended_transfers.fate(reader.name) or self._is_parked(reader):
            return self._drop(DropReason.DUPLICATE)
        try:
            copies = check_reservation(request, self._terms)
        except ProtocolError as error:
            return self._refuse(reader, error)
        lease = self._leases.get(key)
        if lease is not None and lease.state is LeaseState.OFFERED:
            return self._serve(lease, reader, copies, now)
        return self._park(reader, copies, now)

    def _park(self, reader: Reader, copies: Copies, now: float) -> list[ContextAction]:
        """Keep a reservation for a lease that may come; turn it away if the lease was here already."""
        key = reader.request.handle.key
        if key in self._leases or key in self._parked:
            return [self._turn_away(reader, StopReason.REFUSED, f"lease {key} has another reader")]
        fate = self._ended_leases.fate(key)
        if fate is not None:
            return [self._turn_away(reader, fate, f"lease {key} has ended")]
        if len(self._parked) >= self._limits.parked:
            reason = f"no lease {key}, and {len(self._parked)} reservations wait for theirs"
            return [self._turn_away(reader, StopReason.UNKNOWN_LEASE, reason)]
        wait_s = min(self._timeouts.park_s, reader.request.deadline_s)
        self._parked[key] = _Parked(reader, copies, now + wait_s)
        return []

    def _refuse(self, reader: Reader, error: ProtocolError) -> list[ContextAction]:
        if isinstance(error, StaleEpochError):
            self._drop(DropReason.STALE_EPOCH)
            return [self._turn_away(reader, StopReason.UNKNOWN_LEASE, str(error))]
        if isinstance(error, ForgedHandleError):
            self._drop(DropReason.BAD_MAC)
        elif not isinstance(error, ReservationError):
            self._drop(DropReason.UNDECODABLE)
        return [self._turn_away(reader, StopReason.REFUSED, str(error))]

    def _serve(self, lease: Lease, reader: Reader, copies: Copies, now: float) -> list[ContextAction]:
        request = reader.request
        lease.reader = reader
        if not copies.blocks:
            done = Done(request.transfer_id, self._terms.epoch, 0)
            return [Reply(reader.route, done), *self._end(lease, TransferOutcome.DONE)]
        self._counters.times[HandoverPart.LEASE_WAIT].observe(now - lease.offered)
        lease.move(LeaseState.SERVING)
        lease.deadline = now + min(request.deadline_s, self._timeouts.serve_s)
        self._serving[reader.name] = lease.key
        self._heard[request.epoch] = now
        return [StartWriting(lease.key, request, lease.blocks, copies, lease.fence)]

    def _cancel(self, route: bytes, message: Cancel, now: float) -> list[ContextAction]:
        name = (message.epoch, message.transfer_id)
        for key, parked in list(self._parked.items()):
            if parked.reader.name == name:
                del self._parked[key]
        key_served = self._serving.get(name)
        if key_served is None:
            self._ended_transfers.bury(name, True)
            note = "nothing is or will be written for this transfer"
            stopped = Stopped(message.transfer_id, self._terms.epoch, StopReason.CANCELLED, note)
            return [Reply(route, stopped)]
        lease = self._leases[key_served]
        if lease.state is LeaseState.STOPPING:
            return []
        return self._give_up(lease, TransferOutcome.CANCELLED, "the generation worker gave it up", now)

    def _give_up(self, lease: Lease, outcome: TransferOutcome, reason: str, now: float) -> list[ContextAction]:
        lease.outcome, lease.reason = outcome, reason
        if lease.state is LeaseState.OFFERED:
            return self._end(lease, outcome)
        lease.move(LeaseState.STOPPING)
        lease.deadline = now + self._timeouts.stop_s
        return [StopWriting(lease.key)]

    def _end(self, lease: Lease, outcome: TransferOutcome) -> list[ContextAction]:
        lease.move(LeaseState.ENDED)
        del self._leases[lease.key]
        told = outcome in (TransferOutcome.CANCELLED, TransferOutcome.EXPIRED)
        self._ended_leases.bury(lease.key, _STOP_REASONS[outcome] if told else StopReason.UNKNOWN_LEASE)
        if lease.reader:
            self._serving.pop(lease.reader.name, None)
            self._ended_transfers.bury(lease.reader.name, True)
            epoch = lease.reader.request.epoch
            if not any(served == epoch for served, _ in self._serving):
                self._heard.pop(epoch, None)
        self._counters.leases[outcome] += 1
        return [LeaseEnded(lease.key, outcome)]

    def _turn_away(self, reader: Reader, reason: StopReason, message: str) -> Reply:
        self._ended_transfers.bury(reader.name, True)
        return Reply(reader.route, Stopped(reader.request.transfer_id, self._terms.epoch, reason, message))

    def _say_stopped(self, lease: Lease, reason: StopReason) -> Reply:
        reader = _reader(lease)
        return Reply(reader.route, Stopped(reader.request.transfer_id, self._terms.epoch, reason, lease.reason))

    def _is_parked(self, reader: Reader) -> bool:
        parked = self._parked.get(reader.request.handle.key)
        return parked is not None and parked.reader.name == reader.name

    def _drop(self, reason: DropReason) -> list[ContextAction]:
        self._counters.dropped[reason] += 1
        return []


def _reader(lease: Lease) -> Reader:
    if lease.reader is None:
        raise RuntimeError(f"lease {lease.key} is {lease.state.name} without a reader")
    return lease.reader
