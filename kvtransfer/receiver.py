"""The generation side's protocol, without I/O: the fetches of one worker, and when their blocks are safe.

    REQUESTED --Done(all)--------------------------------------> ENDED      FetchEnded(done, blocks_safe=True)
       |  |---Stopped(any reason but failed)-------------------> ENDED      FetchEnded(.., blocks_safe=True)
       |  |---cancel---> CANCELLING ---Stopped or Done---------> ENDED      FetchEnded(cancelled, blocks_safe=True)
       |                     |
       |---deadline, silence, new epoch, Stopped(failed)---> QUARANTINED    FetchEnded(.., blocks_safe=False)
                                                                 |--proof-> ENDED      BlocksSafe

Proof is the writer's word (`Done`, `Stopped`), or a closed inlet where the transport makes that one, or the exit of the
writer's process. `Stopped(failed)` is the writer's word, but bytes that it sent may still be under way, so it takes a
closed inlet as well. Silence and time are no proof.

Every method takes the present monotonic time where it matters, changes state, and returns the actions that the caller
must carry out in order.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.events import BlocksSafe, FetchEnded, TransferOutcome
from kvtransfer.options import TransferTimeouts
from kvtransfer.reservation import ReservationError, check_layout
from twostroke.ipc.pauses import OwnPauses
from twostroke.protocol.transfer import (
    Cancel,
    Done,
    LayoutFingerprint,
    Ping,
    Pong,
    Stopped,
    StopReason,
    ToGeneration,
    TransferHandle,
)


class FetchState(enum.Enum):
    """Where a fetch stands."""

    REQUESTED = enum.auto()
    CANCELLING = enum.auto()
    QUARANTINED = enum.auto()
    ENDED = enum.auto()


TRANSITIONS: dict[FetchState, frozenset[FetchState]] = {
    FetchState.REQUESTED: frozenset({FetchState.CANCELLING, FetchState.QUARANTINED, FetchState.ENDED}),
    FetchState.CANCELLING: frozenset({FetchState.QUARANTINED, FetchState.ENDED}),
    FetchState.QUARANTINED: frozenset({FetchState.ENDED}),
    FetchState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class PeerName:
    """One start of one context worker."""

    address: str
    epoch: int


@dataclass(slots=True)
class Fetch:
    """One transfer that this worker asked for.

    Attributes:
        transfer_id: Its name in our epoch.
        peer: Who writes.
        handle: The lease.
        positions: Numbers within the leased blocks.
        blocks: Our blocks, as many.
        deadline_s: Patience when it began.
        deadline: Monotonic time of the next forced move.
        writer_stopped: The writer said that it will write no more.
    """

    transfer_id: int
    peer: PeerName
    handle: TransferHandle
    positions: Sequence[int]
    blocks: Sequence[int]
    deadline_s: float
    deadline: float
    state: FetchState = FetchState.REQUESTED
    writer_stopped: bool = False

    def move(self, state: FetchState) -> None:
        """Enter `state`.

        Raises:
            RuntimeError: The table does not allow it: a bug.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"fetch {self.transfer_id} cannot go from {self.state.name} to {state.name}")
        self.state = state


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Open an inlet for the peer if it has none, and send it the `Reserve` of this fetch."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer`."""

    peer: PeerName
    message: Cancel | Ping


@dataclass(frozen=True, slots=True)
class CloseInlet:
    """Close the inlet of `peer` and report `inlet_closed`."""

    peer: PeerName


GenerationAction = RequestBlocks | Send | CloseInlet | FetchEnded | BlocksSafe

_OUTCOMES = {
    StopReason.CANCELLED: TransferOutcome.CANCELLED,
    StopReason.EXPIRED: TransferOutcome.EXPIRED,
    StopReason.UNKNOWN_LEASE: TransferOutcome.FAILED,
    StopReason.REFUSED: TransferOutcome.FAILED,
    StopReason.FAILED: TransferOutcome.FAILED,
}


@dataclass(slots=True)
class _Peer:
    heard: float
    pinged: float
    fetches: dict[int, Fetch] = field(default_factory=dict)


class FetchBook:
    """All fetches of one generation worker.

    Args:
        epoch: Of this worker.
        layout: Of its cache.
        timeouts: Durations.
        counters: Counted into; gauges are the caller's.
    """

    def __init__(
        self, epoch: int, layout: LayoutFingerprint, timeouts: TransferTimeouts, counters: TransferCounters
    ) -> None:
        self._epoch = epoch
        self._layout = layout
        self._timeouts = timeouts
        self._counters = counters
        self._peers: dict[PeerName, _Peer] = {}
        self._fetches: dict[int, Fetch] = {}
        self._pauses = OwnPauses(timeouts.silence_s)

    @property
    def open_fetches(self) -> int:
        """Fetches that have not reported `FetchEnded`."""
        return len(self._fetches) - self.quarantined

    @property
    def quarantined(self) -> int:
        """Fetches whose blocks are not proven safe after they ended."""
        return sum(fetch.state is FetchState.QUARANTINED for fetch in self._fetches.values())

    def busy(self, peer: PeerName) -> bool:
        """Whether any fetch from `peer` is open or in quarantine."""
        return peer in self._peers

    def fetch(self, fetch: Fetch, now: float) -> list[GenerationAction]:
        """A new fetch; refused at once if the two caches differ in layout.

        Raises:
            ValueError: The transfer id is taken.
        """
        if fetch.transfer_id in self._fetches:
            raise ValueError(f"transfer {fetch.transfer_id} is open already")
        try:
            check_layout(fetch.handle.layout, self._layout)
        except ReservationError as error:
            self._counters.fetches[TransferOutcome.FAILED] += 1
            return [FetchEnded(fetch.transfer_id, TransferOutcome.FAILED, True, reason=str(error))]
        peer = self._peers.setdefault(fetch.peer, _Peer(heard=now, pinged=-math.inf))
        peer.fetches[fetch.transfer_id] = self._fetches[fetch.transfer_id] = fetch
        return [RequestBlocks(fetch)]

    def cancel(self, transfer_id: int, now: float) -> list[GenerationAction]:
        """The engine gives a fetch up. Nothing happens if it has ended or is ending."""
        fetch = self._fetches.get(transfer_id)
        if fetch is None or fetch.state is not FetchState.REQUESTED:
            return []
        fetch.move(FetchState.CANCELLING)
        fetch.deadline = now + self._timeouts.stop_s
        return [self._send_cancel(fetch)]

    def cancel_all(self, now: float) -> list[GenerationAction]:
        """Give every fetch up: the worker shuts down."""
        return [action for transfer_id in list(self._fetches) for action in self.cancel(transfer_id, now)]

    def not_sent(self, fetch: Fetch, reason: str) -> list[GenerationAction]:
        """The `Reserve` never left this process: nothing will be written."""
        return [self._finish(fetch, TransferOutcome.FAILED, reason)]

    def receive(self, name: PeerName, message: ToGeneration, now: float) -> list[GenerationAction]:
        """A message from whoever answers at the peer's address."""
        peer = self._peers.get(name)
        if message.epoch != name.epoch:
            return self._restarted(name, message.epoch)
        if peer is not None:
            peer.heard = now
        if isinstance(message, Pong):
            return []
        fetch = peer.fetches.get(message.transfer_id) if peer else None
        if fetch is None:
            return self._drop(DropReason.UNKNOWN_TRANSFER)
        return self._done(fetch, message) if isinstance(message, Done) else self._stopped(fetch, message)

    def inlet_closed(self, name: PeerName, *, proof: bool) -> list[GenerationAction]:
        """The peer's inlet is closed; `proof`: so nothing can write through it.

        Fetches that were still open on it fail: their bytes can no longer arrive.
        """
        actions: list[GenerationAction] = []
        reason = "the connection to the context worker was closed"
        for fetch in self._fetches_of(name):
            if proof or fetch.writer_stopped:
                actions.append(self._finish(fetch, TransferOutcome.FAILED, reason))
            elif fetch.state is not FetchState.QUARANTINED:
                actions += [self._quarantine(fetch, TransferOutcome.FAILED, reason), self._send_cancel(fetch)]
        return actions

    def writer_exited(self, name: PeerName) -> list[GenerationAction]:
        """The peer's process is proven to be gone."""
        reason = "the context worker's process exited"
        finished = [self._finish(fetch, TransferOutcome.FAILED, reason) for fetch in self._fetches_of(name)]
        return [CloseInlet(name), *finished]

    def tick(self, now: float) -> list[GenerationAction]:
        """Whatever is due by now."""
        actions: list[GenerationAction] = []
        pause_s = self._pauses.look(now)
        for name, peer in list(self._peers.items()):
            peer.heard = min(now, peer.heard + pause_s)  # nobody was asked for a sign of life meanwhile
            if now - peer.heard >= self._timeouts.silence_s:
                reason = f"the context worker was silent for {self._timeouts.silence_s} s"
                actions += self._lost(name, reason)
            for fetch in list(peer.fetches.values()):
                if now >= fetch.deadline:
                    actions += self._overdue(fetch, now)
            if now - peer.pinged >= self._timeouts.ping_s:
                peer.pinged = now
                actions.append(Send(name, Ping(self._epoch)))
        return actions

    def _overdue(self, fetch: Fetch, now: float) -> list[GenerationAction]:
        if fetch.state is FetchState.REQUESTED:
            reason = f"no end after {fetch.deadline_s} s"
            ended = self._quarantine(fetch, TransferOutcome.EXPIRED, reason)
            fetch.deadline = now + self._timeouts.stop_s
            return [ended, self._send_cancel(fetch)]
        if fetch.state is FetchState.CANCELLING:
            reason = f"no answer to the cancellation after {self._timeouts.stop_s} s"
            return [self._quarantine(fetch, TransferOutcome.CANCELLED, reason), CloseInlet(fetch.peer)]
        fetch.deadline = math.inf
        return [CloseInlet(fetch.peer)]

    def _restarted(self, name: PeerName, epoch: int) -> list[GenerationAction]:
        self._drop(DropReason.STALE_EPOCH)
        return self._lost(name, f"the context worker at {name.address} restarted as epoch {epoch:x}")

    def _lost(self, name: PeerName, reason: str) -> list[GenerationAction]:
        """Quarantine whatever is open with the peer, tell it to stop should it live, and close its inlet."""
        actions: list[GenerationAction] = []
        for fetch in self._fetches_of(name):
            if fetch.state is not FetchState.QUARANTINED:
                outcome = TransferOutcome.CANCELLED if fetch.state is FetchState.CANCELLING else TransferOutcome.FAILED
                actions += [self._quarantine(fetch, outcome, reason), self._send_cancel(fetch)]
        return [*actions, CloseInlet(name)] if actions else []

    def _done(self, fetch: Fetch, message: Done) -> list[GenerationAction]:
        asked = len(fetch.blocks)
        if message.count != asked:
            reason = f"the context worker wrote {message.count} blocks instead of {asked}"
            return [self._finish(fetch, TransferOutcome.FAILED, reason)]
        return [self._finish(fetch, TransferOutcome.DONE, "")]

    def _stopped(self, fetch: Fetch, message: Stopped) -> list[GenerationAction]:
        outcome = _OUTCOMES[message.reason]
        if message.reason is not StopReason.FAILED:
            return [self._finish(fetch, outcome, message.message)]
        fetch.writer_stopped = True
        if fetch.state is FetchState.QUARANTINED:
            return [CloseInlet(fetch.peer)]
        return [self._quarantine(fetch, outcome, message.message), CloseInlet(fetch.peer)]

    def _quarantine(self, fetch: Fetch, outcome: TransferOutcome, reason: str) -> FetchEnded:
        fetch.move(FetchState.QUARANTINED)
        fetch.deadline = math.inf
        self._counters.fetches[outcome] += 1
        return FetchEnded(fetch.transfer_id, outcome, False, reason=reason)

    def _finish(self, fetch: Fetch, outcome: TransferOutcome, reason: str) -> FetchEnded | BlocksSafe:
        """End a fetch whose blocks are safe; `outcome` counts only if it is not told yet."""
        before = fetch.state
        fetch.move(FetchState.ENDED)
        self._forget(fetch)
        if before is FetchState.QUARANTINED:
            return BlocksSafe(fetch.transfer_id)
        if before is FetchState.CANCELLING:
            outcome, reason = TransferOutcome.CANCELLED, reason or "cancelled as it finished"
        self._counters.fetches[outcome] += 1
        count = len(fetch.blocks) if outcome is TransferOutcome.DONE else 0
        return FetchEnded(fetch.transfer_id, outcome, True, count, reason)

    def _forget(self, fetch: Fetch) -> None:
        del self._fetches[fetch.transfer_id]
        peer = self._peers[fetch.peer]
        del peer.fetches[fetch.transfer_id]
        if not peer.fetches:
            del self._peers[fetch.peer]

    def _fetches_of(self, name: PeerName) -> list[Fetch]:
        peer = self._peers.get(name)
        return list(peer.fetches.values()) if peer else []

    def _send_cancel(self, fetch: Fetch) -> Send:
        return Send(fetch.peer, Cancel(fetch.transfer_id, self._epoch))

    def _drop(self, reason: DropReason) -> list[GenerationAction]:
        self._counters.dropped[reason] += 1
        return []
