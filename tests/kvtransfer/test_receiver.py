"""The generation side's protocol as a table: when a fetch ends, and when its blocks are safe. No sockets."""

import msgspec
import pytest

from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.events import BlocksSafe, FetchEnded, TransferOutcome
from kvtransfer.options import TransferTimeouts
from kvtransfer.receiver import CloseInlet, Fetch, FetchBook, GenerationAction, PeerName, RequestBlocks, Send
from tests.support.transfer import LAYOUT
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import (
    TRANSFER_VERSION,
    Cancel,
    Done,
    LayoutFingerprint,
    Ping,
    Pong,
    Stopped,
    StopReason,
    TransferHandle,
)

EPOCH, THEIRS = 22, 11
PEER = PeerName("tcp://127.0.0.1:1", THEIRS)
TIMEOUTS = TransferTimeouts(ping_s=1.0, silence_s=5.0, stop_s=3.0)


class Book(FetchBook):
    """A fetch book with its counters at hand."""

    def __init__(self) -> None:
        self.counts = TransferCounters()
        super().__init__(EPOCH, LAYOUT, TIMEOUTS, self.counts)


def fetch(transfer_id: int = 1, deadline_s: float = 60.0, layout: LayoutFingerprint = LAYOUT) -> Fetch:
    """A fetch of two blocks that began at time 0."""
    handle = TransferHandle(
        version=TRANSFER_VERSION,
        epoch=THEIRS,
        key=SequenceKey(transfer_id),
        address=PEER.address,
        layout=layout,
        blocks=3,
        expires_in_s=10.0,
    )
    return Fetch(transfer_id, PEER, handle, (0, 2), (7, 8), deadline_s, deadline_s)


def ends(actions: list[GenerationAction]) -> list[tuple[int, TransferOutcome, bool]]:
    """(transfer, outcome, blocks safe) of each `FetchEnded`."""
    return [(a.transfer_id, a.outcome, a.blocks_safe) for a in actions if isinstance(a, FetchEnded)]


def opened(*transfer_ids: int) -> Book:
    """A book with these fetches requested."""
    book = Book()
    for transfer_id in transfer_ids or (1,):
        wanted = fetch(transfer_id)
        assert book.fetch(wanted, 0.0) == [RequestBlocks(wanted)]
    return book


def test_done_with_the_right_count_is_the_only_success() -> None:
    """All blocks hold what was asked for."""
    book = opened()
    assert book.receive(PEER, Done(1, THEIRS, 2), 1.0) == [FetchEnded(1, TransferOutcome.DONE, True, 2)]
    assert not book.busy(PEER)


def test_done_with_another_count_fails() -> None:
    """The writer is finished, so the blocks are safe, but they are not what was asked for."""
    ended = opened().receive(PEER, Done(1, THEIRS, 1), 1.0)
    assert ends(ended) == [(1, TransferOutcome.FAILED, True)]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (StopReason.CANCELLED, TransferOutcome.CANCELLED),
        (StopReason.EXPIRED, TransferOutcome.EXPIRED),
        (StopReason.UNKNOWN_LEASE, TransferOutcome.FAILED),
        (StopReason.REFUSED, TransferOutcome.FAILED),
    ],
)
def test_stopped_is_proof(reason: StopReason, outcome: TransferOutcome) -> None:
    """The writer's word: nothing of this transfer is under way."""
    ended = opened().receive(PEER, Stopped(1, THEIRS, reason, "why"), 1.0)
    assert ended == [FetchEnded(1, outcome, True, reason="why")]


def test_stopped_by_a_failure_takes_a_closed_inlet_as_well() -> None:
    """Bytes that were sent may still be under way; closing suffices even where it alone is no proof."""
    book = opened()
    actions = book.receive(PEER, Stopped(1, THEIRS, StopReason.FAILED, "reset"), 1.0)
    assert ends(actions) == [(1, TransferOutcome.FAILED, False)]
    assert actions[-1] == CloseInlet(PEER)
    assert book.inlet_closed(PEER, proof=False) == [BlocksSafe(1)]


def test_silence_is_no_proof() -> None:
    """All fetches of the peer end unsafe; the closed inlet makes them safe where it is proof."""
    book = opened(1, 2)
    actions = book.tick(5.0)
    assert ends(actions) == [(1, TransferOutcome.FAILED, False), (2, TransferOutcome.FAILED, False)]
    assert CloseInlet(PEER) in actions
    assert book.quarantined == 2
    assert book.inlet_closed(PEER, proof=True) == [BlocksSafe(1), BlocksSafe(2)]
    assert book.quarantined == 0


def test_a_pause_of_our_own_is_no_silence_of_the_peer() -> None:
    """Nothing was asked meanwhile; from its end on the peer has its time again."""
    book = opened()
    for now in (0.5, 1.0, 7.0, 9.0, 10.9):
        assert ends(book.tick(now)) == []
    assert ends(book.tick(11.0)) == [(1, TransferOutcome.FAILED, False)]


def test_without_proof_the_quarantine_stays_until_the_writer_speaks_or_exits() -> None:
    """Shared memory: a closed inlet does not stop the writer."""
    book = opened(1, 2)
    book.tick(5.0)
    assert book.inlet_closed(PEER, proof=False) == []
    assert book.quarantined == 2
    assert book.receive(PEER, Stopped(1, THEIRS, StopReason.CANCELLED, ""), 99.0) == [BlocksSafe(1)]
    assert book.writer_exited(PEER) == [CloseInlet(PEER), BlocksSafe(2)]


def test_a_pong_in_time_keeps_the_peer_alive() -> None:
    """Pings go out each second while a fetch is open."""
    book = opened()
    assert book.tick(1.0) == [Send(PEER, Ping(EPOCH))]
    book.tick(3.0)
    book.receive(PEER, Pong(THEIRS), 4.0)
    for now in (5.0, 7.0, 8.9):
        assert ends(book.tick(now)) == []
    assert ends(book.tick(9.0)) == [(1, TransferOutcome.FAILED, False)]


def test_the_deadline_asks_first_and_closes_later() -> None:
    """A live peer gets `stop_s` to answer `Cancel`, so that its other transfers survive."""
    book = Book()
    book.fetch(fetch(1, deadline_s=2.0), 0.0)
    book.fetch(fetch(2), 0.0)
    actions = book.tick(2.0)
    assert ends(actions) == [(1, TransferOutcome.EXPIRED, False)]
    assert Send(PEER, Cancel(1, EPOCH)) in actions
    assert CloseInlet(PEER) not in actions
    book.receive(PEER, Pong(THEIRS), 4.0)
    assert CloseInlet(PEER) not in book.tick(4.9)
    assert CloseInlet(PEER) in book.tick(5.0)
    assert book.inlet_closed(PEER, proof=True)[0] == BlocksSafe(1)


def test_cancel_waits_for_the_writer() -> None:
    """`FetchEnded` comes with the answer."""
    book = opened()
    assert book.cancel(1, 1.0) == [Send(PEER, Cancel(1, EPOCH))]
    assert book.cancel(1, 1.0) == []
    stopped = Stopped(1, THEIRS, StopReason.CANCELLED, "gave up")
    assert ends(book.receive(PEER, stopped, 2.0)) == [(1, TransferOutcome.CANCELLED, True)]


def test_a_transfer_that_finishes_under_its_cancellation_counts_as_cancelled() -> None:
    """`Done` crossed `Cancel`; the blocks are safe either way."""
    book = opened()
    book.cancel(1, 1.0)
    assert ends(book.receive(PEER, Done(1, THEIRS, 2), 2.0)) == [(1, TransferOutcome.CANCELLED, True)]


def test_an_unanswered_cancellation_ends_in_quarantine() -> None:
    """After `stop_s`, and the inlet is closed."""
    book = opened()
    book.cancel(1, 0.5)
    book.receive(PEER, Pong(THEIRS), 3.0)
    actions = book.tick(3.5)
    assert ends(actions) == [(1, TransferOutcome.CANCELLED, False)]
    assert CloseInlet(PEER) in actions


def test_another_epoch_at_the_same_address_fails_everything_at_once() -> None:
    """The worker restarted; its answer is dropped and counted."""
    book = opened(1, 2)
    actions = book.receive(PEER, Pong(THEIRS + 1), 1.0)
    assert [outcome for _, outcome, _ in ends(actions)] == [TransferOutcome.FAILED] * 2
    assert actions[-1] == CloseInlet(PEER)
    assert book.counts.dropped[DropReason.STALE_EPOCH] == 1


def test_fetches_open_on_a_closed_inlet_fail() -> None:
    """Their bytes can no longer arrive: with proof they are safe, without it they go to quarantine."""
    assert ends(opened().inlet_closed(PEER, proof=True)) == [(1, TransferOutcome.FAILED, True)]
    book = opened()
    actions = book.inlet_closed(PEER, proof=False)
    assert ends(actions) == [(1, TransferOutcome.FAILED, False)]
    assert Send(PEER, Cancel(1, EPOCH)) in actions


def test_another_layout_is_refused_here_with_both_fingerprints() -> None:
    """Nothing is sent."""
    other = msgspec.structs.replace(LAYOUT, head_dim=128)
    (ended,) = Book().fetch(fetch(layout=other), 0.0)
    assert isinstance(ended, FetchEnded)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, True)
    assert str(other) in ended.reason
    assert str(LAYOUT) in ended.reason


def test_messages_about_ended_transfers_are_dropped_and_counted() -> None:
    """Late or repeated."""
    book = opened()
    book.receive(PEER, Done(1, THEIRS, 2), 1.0)
    assert book.receive(PEER, Done(1, THEIRS, 2), 1.0) == []
    assert book.counts.dropped[DropReason.UNKNOWN_TRANSFER] == 1
