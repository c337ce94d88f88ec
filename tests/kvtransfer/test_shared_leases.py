"""Leases of several sequences on the same blocks: each reader has its own, and none disturbs another's."""

from kvtransfer.counters import TransferCounters
from kvtransfer.events import LeaseEnded, TransferOutcome
from kvtransfer.handles import handle_key, sign_handle
from kvtransfer.options import TransferLimits, TransferTimeouts
from kvtransfer.reservation import ContextTerms
from kvtransfer.sender import ContextAction, LeaseBook, StartWriting
from tests.support.transfer import LAYOUT, SECRET
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, Cancel, Reserve, TransferHandle

BLOCKS = (4, 9, 2)
KEYS = [SequenceKey(5, index) for index in range(3)]
TERMS = ContextTerms(11, handle_key(SECRET), LAYOUT, block_bytes=128)


def book() -> LeaseBook:
    """Three leases on the same blocks."""
    made = LeaseBook(TERMS, TransferTimeouts(), TransferLimits(), TransferCounters())
    for key in KEYS:
        made.offer(key, BLOCKS, 10.0, 0.0)
    return made


def reserve(index: int, positions: tuple[int, ...] = (0, 1, 2)) -> Reserve:
    """The reservation of one reader; each into blocks of its own."""
    handle = TransferHandle(
        version=TRANSFER_VERSION,
        epoch=11,
        key=KEYS[index],
        address="tcp://127.0.0.1:1",
        layout=LAYOUT,
        blocks=len(BLOCKS),
        expires_in_s=10.0,
    )
    return Reserve(
        version=TRANSFER_VERSION,
        transfer_id=index + 1,
        epoch=22,
        handle=sign_handle(TERMS.key, handle),
        positions=pack_tokens(positions),
        blocks=pack_tokens(range(10 * index, 10 * index + len(positions))),
        base=4096,
        block_bytes=128,
        num_blocks=100,
        peer_address=b"inlet",
        rkey=b"key",
        deadline_s=30.0,
    )


def ended(actions: list[ContextAction]) -> list[tuple[SequenceKey, TransferOutcome]]:
    """The leases that ended."""
    return [(action.key, action.outcome) for action in actions if isinstance(action, LeaseEnded)]


def test_all_readers_are_served_at_the_same_time_and_end_one_by_one() -> None:
    """The blocks are the same for each; the engine hears of each end, and gives its holds up one by one."""
    leases = book()
    for index in range(3):
        [start] = leases.receive(b"route", reserve(index), 1.0)
        assert isinstance(start, StartWriting)
        assert (start.key, tuple(start.leased)) == (KEYS[index], BLOCKS)
    assert ended([action for key in reversed(KEYS) for action in leases.written(key)]) == [
        (key, TransferOutcome.DONE) for key in reversed(KEYS)
    ]


def test_a_reader_that_gives_up_takes_nothing_from_the_others() -> None:
    """One cancels while it is served, one is revoked before it came, one reads on."""
    leases = book()
    leases.receive(b"route", reserve(0), 1.0)
    leases.receive(b"route", reserve(1), 1.0)
    leases.receive(b"route", Cancel(1, 22), 2.0)
    assert ended(leases.stopped(KEYS[0])) == [(KEYS[0], TransferOutcome.CANCELLED)]
    assert ended(leases.revoke(KEYS[2], 2.0)) == [(KEYS[2], TransferOutcome.CANCELLED)]
    assert ended(leases.written(KEYS[1])) == [(KEYS[1], TransferOutcome.DONE)]


def test_a_reader_that_needs_nothing_ends_its_own_lease_only() -> None:
    """Its prefix cache held all; the others are still to come, or expire."""
    leases = book()
    assert ended(leases.receive(b"route", reserve(1, ()), 1.0)) == [(KEYS[1], TransferOutcome.DONE)]
    assert ended(leases.tick(11.0)) == [(KEYS[0], TransferOutcome.EXPIRED), (KEYS[2], TransferOutcome.EXPIRED)]
