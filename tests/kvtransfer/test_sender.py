"""The context side's protocol as a table: what each message or timer does to which lease. No I/O."""

import msgspec
import pytest

from kvtransfer.counters import DropReason, TransferCounters
from kvtransfer.events import LeaseEnded, TransferOutcome
from kvtransfer.handles import handle_key, sign_handle
from kvtransfer.lease import TRANSITIONS, Lease, LeaseState
from kvtransfer.options import TransferLimits, TransferTimeouts
from kvtransfer.reservation import ContextTerms
from kvtransfer.sender import BreakConnection, ContextAction, LeaseBook, Reply, StartWriting, StopWriting
from tests.support.transfer import LAYOUT, SECRET
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import (
    TRANSFER_VERSION,
    Cancel,
    Done,
    Ping,
    Pong,
    Reserve,
    Stopped,
    StopReason,
    TransferHandle,
)

EPOCH, THEIR_EPOCH = 11, 22
KEY = SequenceKey(5)
ROUTE = b"route"
TIMEOUTS = TransferTimeouts(ping_s=1.0, silence_s=5.0, park_s=2.0, serve_s=60.0, stop_s=3.0)
LIMITS = TransferLimits()
TERMS = ContextTerms(EPOCH, handle_key(SECRET), LAYOUT, block_bytes=128)


class Book(LeaseBook):
    """A lease book with its counters at hand."""

    def __init__(self, limits: TransferLimits = LIMITS) -> None:
        self.counts = TransferCounters()
        super().__init__(TERMS, TIMEOUTS, limits, self.counts)


def handle(key: SequenceKey = KEY, blocks: int = 3, epoch: int = EPOCH) -> TransferHandle:
    """A signed handle."""
    unsigned = TransferHandle(
        version=TRANSFER_VERSION,
        epoch=epoch,
        key=key,
        address="tcp://127.0.0.1:1",
        layout=LAYOUT,
        blocks=blocks,
        expires_in_s=10.0,
    )
    return sign_handle(TERMS.key, unsigned)


def reserve(transfer_id: int = 1, positions: tuple[int, ...] = (0, 2), **changes: object) -> Reserve:
    """A reservation that is in order unless `changes` say otherwise."""
    request = Reserve(
        version=TRANSFER_VERSION,
        transfer_id=transfer_id,
        epoch=THEIR_EPOCH,
        handle=handle(),
        positions=pack_tokens(positions),
        blocks=pack_tokens(range(7, 7 + len(positions))),
        base=4096,
        block_bytes=128,
        num_blocks=100,
        peer_address=b"inlet",
        rkey=b"key",
        deadline_s=30.0,
    )
    return msgspec.structs.replace(request, **changes)


def stop_of(actions: list[ContextAction]) -> Stopped:
    """The `Stopped` among the replies."""
    (stopped,) = [a.message for a in actions if isinstance(a, Reply) and isinstance(a.message, Stopped)]
    return stopped


def serving(book: LeaseBook, now: float = 0.0) -> StartWriting:
    """Offer a lease and reserve it."""
    assert book.offer(KEY, [40, 41, 50], 10.0, now) == []
    (start,) = book.receive(ROUTE, reserve(), now)
    assert isinstance(start, StartWriting)
    return start


def test_a_reservation_starts_writing_and_its_end_ends_the_lease() -> None:
    """The ordinary life."""
    book = Book()
    start = serving(book)
    assert (start.copies.positions, start.copies.blocks, start.leased) == ([0, 2], [7, 8], [40, 41, 50])
    assert book.state_of(KEY) is LeaseState.SERVING
    assert book.written(KEY) == [
        Reply(ROUTE, Done(1, EPOCH, 2)),
        LeaseEnded(KEY, TransferOutcome.DONE),
    ]
    assert book.open_leases == 0


def test_no_blocks_end_the_lease_at_once() -> None:
    """An empty reservation is a release."""
    book = Book()
    book.offer(KEY, [40, 41, 50], 10.0, 0.0)
    assert book.receive(ROUTE, reserve(positions=()), 1.0) == [
        Reply(ROUTE, Done(1, EPOCH, 0)),
        LeaseEnded(KEY, TransferOutcome.DONE),
    ]


def test_a_reservation_waits_for_its_lease() -> None:
    """It may arrive first: it is parked, and served when the lease is offered."""
    book = Book()
    assert book.receive(ROUTE, reserve(), 0.0) == []
    assert book.parked == 1
    (start,) = book.offer(KEY, [40, 41, 50], 10.0, 1.0)
    assert isinstance(start, StartWriting)
    assert book.parked == 0


def test_a_parked_reservation_is_turned_away_in_the_end() -> None:
    """No lease came within the park time."""
    book = Book()
    book.receive(ROUTE, reserve(), 0.0)
    assert book.tick(1.9) == []
    assert stop_of(book.tick(2.0)).reason is StopReason.UNKNOWN_LEASE
    assert book.parked == 0


def test_parking_is_bounded() -> None:
    """Further reservations are turned away at once."""
    book = Book(TransferLimits(parked=1))
    book.receive(ROUTE, reserve(), 0.0)
    other = reserve(2, handle=handle(SequenceKey(6)))
    assert stop_of(book.receive(ROUTE, other, 0.0)).reason is StopReason.UNKNOWN_LEASE


def test_a_lease_expires_only_before_it_is_served() -> None:
    """A reader that came in time is served up to its own deadline, here the reservation's."""
    book = Book()
    book.offer(SequenceKey(9), [1], 1.0, 0.0)
    serving(book)
    assert book.tick(1.0) == [LeaseEnded(SequenceKey(9), TransferOutcome.EXPIRED)]
    for now in range(1, 30):
        book.receive(ROUTE, Ping(THEIR_EPOCH), float(now))
        assert StopWriting(KEY) not in book.tick(float(now))
    assert book.tick(30.0) == [StopWriting(KEY)]
    assert stop_of(book.stopped(KEY)).reason is StopReason.EXPIRED


def test_a_cancelled_transfer_stops_before_it_says_so() -> None:
    """`Stopped` is sent when nothing is in flight, not when `Cancel` arrives."""
    book = Book()
    serving(book)
    assert book.receive(ROUTE, Cancel(1, THEIR_EPOCH), 1.0) == [StopWriting(KEY)]
    assert book.state_of(KEY) is LeaseState.STOPPING
    ended = book.stopped(KEY)
    assert stop_of(ended).reason is StopReason.CANCELLED
    assert ended[-1] == LeaseEnded(KEY, TransferOutcome.CANCELLED)


def test_operations_that_never_end_break_the_connection() -> None:
    """After `stop_s` the connection goes, and the word to the peer is FAILED, which makes it close its inlet."""
    book = Book()
    serving(book)
    book.revoke(KEY, 1.0)
    assert book.tick(3.9) == []
    (broken,) = book.tick(4.0)
    assert isinstance(broken, BreakConnection)
    ended = book.failed(KEY, broken.reason)
    assert stop_of(ended).reason is StopReason.FAILED
    assert ended[-1] == LeaseEnded(KEY, TransferOutcome.CANCELLED)


def test_a_silent_reader_is_given_up() -> None:
    """No ping for `silence_s` while it is served."""
    book = Book()
    serving(book)
    book.receive(ROUTE, Ping(THEIR_EPOCH), 4.0)
    assert book.tick(8.9) == []
    assert book.tick(9.0) == [StopWriting(KEY)]


def test_a_pause_of_our_own_is_no_silence_of_the_reader() -> None:
    """Its pings may not have been read yet, or its host paused too."""
    book = Book()
    serving(book)
    for now in (0.5, 1.0, 7.0, 9.0, 10.9):
        assert book.tick(now) == []
    assert book.tick(11.0) == [StopWriting(KEY)]


def test_cancel_before_its_reservation_keeps_the_reservation_out() -> None:
    """Whatever arrives later under that name is dropped."""
    book = Book()
    book.offer(KEY, [40, 41, 50], 10.0, 0.0)
    assert stop_of(book.receive(ROUTE, Cancel(1, THEIR_EPOCH), 0.0)).reason is StopReason.CANCELLED
    assert book.receive(ROUTE, reserve(), 0.0) == []
    assert book.counts.dropped[DropReason.DUPLICATE] == 1


def test_duplicates_are_dropped_and_counted() -> None:
    """While parked, while served, and after the end."""
    book = Book()
    book.receive(ROUTE, reserve(), 0.0)
    assert book.receive(ROUTE, reserve(), 0.0) == []
    book.offer(KEY, [40, 41, 50], 10.0, 0.0)
    assert book.receive(ROUTE, reserve(), 0.0) == []
    book.written(KEY)
    assert book.receive(ROUTE, reserve(), 0.0) == []
    assert book.counts.dropped[DropReason.DUPLICATE] == 3


def test_a_second_reader_is_refused() -> None:
    """One lease, one reader."""
    book = Book()
    serving(book)
    assert stop_of(book.receive(ROUTE, reserve(2), 0.0)).reason is StopReason.REFUSED


def test_an_ended_lease_answers_from_its_tombstone_until_that_is_forgotten() -> None:
    """Bounded memory: afterwards the reservation is one for an unknown lease."""
    book = Book(TransferLimits(tombstones=1))
    book.offer(KEY, [1, 2, 3], 10.0, 0.0)
    book.revoke(KEY, 0.0)
    assert stop_of(book.receive(ROUTE, reserve(2), 0.0)).reason is StopReason.CANCELLED
    book.offer(SequenceKey(8), [1], 10.0, 0.0)
    book.revoke(SequenceKey(8), 0.0)
    assert book.receive(ROUTE, reserve(3), 0.0) == []
    assert book.parked == 1


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (reserve(version=99), "version 99"),
        (reserve(block_bytes=64), "64 bytes cannot take blocks of 128"),
        (reserve(positions=(0, 3)), "outside the 3 leased blocks"),
        (reserve(positions=(-1,)), "outside the 3 leased blocks"),
        (reserve(num_blocks=8), "outside the cache of 8 blocks"),
        (reserve(blocks=pack_tokens([7, 7])), "named twice"),
        (reserve(blocks=pack_tokens([7])), "2 positions do not match 1 blocks"),
        (reserve(blocks=b"\0"), "not a whole number of int32"),
        (reserve(base=0), "not in memory"),
        (reserve(base=2**64 - 128), "not in memory"),
    ],
)
def test_a_reservation_out_of_order_is_refused_with_the_value(request_: Reserve, words: str) -> None:
    """Nothing is written for it, and the lease stays for a proper one."""
    book = Book()
    book.offer(KEY, [40, 41, 50], 10.0, 0.0)
    stopped = stop_of(book.receive(ROUTE, request_, 0.0))
    assert stopped.reason is StopReason.REFUSED
    assert words in stopped.message
    assert book.state_of(KEY) is LeaseState.OFFERED


def test_another_layout_is_refused_with_both_fingerprints() -> None:
    """The message names what the handle has and what this worker has."""
    book = Book()
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    foreign = sign_handle(TERMS.key, msgspec.structs.replace(handle(), layout=other, mac=b""))
    stopped = stop_of(book.receive(ROUTE, reserve(handle=foreign), 0.0))
    assert stopped.reason is StopReason.REFUSED
    assert str(other) in stopped.message
    assert str(LAYOUT) in stopped.message


def test_a_forged_handle_is_refused_and_counted() -> None:
    """Any changed field breaks the MAC."""
    book = Book()
    book.offer(KEY, [40, 41, 50], 10.0, 0.0)
    forged = msgspec.structs.replace(handle(), blocks=50)
    assert stop_of(book.receive(ROUTE, reserve(handle=forged), 0.0)).reason is StopReason.REFUSED
    assert book.counts.dropped[DropReason.BAD_MAC] == 1


def test_a_handle_of_an_earlier_epoch_is_refused_and_counted() -> None:
    """The answer carries the present epoch, so the peer learns of the restart at once."""
    book = Book()
    stopped = stop_of(book.receive(ROUTE, reserve(handle=handle(epoch=10)), 0.0))
    assert (stopped.reason, stopped.epoch) == (StopReason.UNKNOWN_LEASE, EPOCH)
    assert book.counts.dropped[DropReason.STALE_EPOCH] == 1


def test_ping_is_answered_with_our_epoch() -> None:
    """Whoever asks."""
    assert Book().receive(ROUTE, Ping(THEIR_EPOCH), 0.0) == [Reply(ROUTE, Pong(EPOCH))]


def test_a_lease_moves_only_as_the_table_says() -> None:
    """Every pair of states that the table does not list is an error."""
    for start in LeaseState:
        for end in LeaseState:
            lease = Lease(KEY, [], 0.0, 0.0, state=start)
            if end in TRANSITIONS[start]:
                lease.move(end)
                assert lease.state is end
            else:
                with pytest.raises(RuntimeError, match="cannot go"):
                    lease.move(end)


def test_a_key_cannot_be_leased_twice() -> None:
    """While its lease is open."""
    book = Book()
    book.offer(KEY, [1], 10.0, 0.0)
    with pytest.raises(ValueError, match="open lease already"):
        book.offer(KEY, [1], 10.0, 0.0)
