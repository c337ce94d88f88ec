"""The context side over a transport that is stuck: leases that share a connection, and what one of them does to all."""

import time
from collections.abc import Iterator

import pytest
import zmq

from kvtransfer.context_side import ContextSide
from kvtransfer.counters import TransferCounters
from kvtransfer.events import LeaseEnded, TransferEvent, TransferOutcome
from kvtransfer.handles import handle_key, sign_handle
from kvtransfer.loopback import LoopbackBackend, LoopbackFabric
from kvtransfer.options import TransferLimits, TransferTimeouts
from kvtransfer.reservation import ContextTerms
from kvtransfer.sender import LeaseBook
from tests.support.transfer import LAYOUT, SECRET, buffer_of, context_memory, generation_memory
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, Reserve, TransferHandle

EPOCH, THEIR_EPOCH = 11, 22
BLOCK_BYTES = 64
FIRST, SECOND, THIRD = SequenceKey(5), SequenceKey(6), SequenceKey(7)
TIMEOUTS = TransferTimeouts(ping_s=1.0, silence_s=5.0, stop_s=2.0)


class StuckBackend(LoopbackBackend):
    """A transport whose peer has stopped: writes and flushes start, and never end."""

    def progress(self) -> bool:
        """Nothing moves."""
        return False


class Context:
    """A context side, its book and what it told the engine; the peer's inlet is `inlet`."""

    def __init__(self) -> None:
        fabric = LoopbackFabric()
        self._memories = context_memory(16, BLOCK_BYTES), generation_memory(16, BLOCK_BYTES)
        backend, peer = StuckBackend(fabric), LoopbackBackend(fabric)
        backend.register(buffer_of(self._memories[0]))
        peer.register(buffer_of(self._memories[1]))
        self.inlet = peer.open_inlet()
        self.events: list[TransferEvent] = []
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        counters, limits = TransferCounters(), TransferLimits()
        terms = ContextTerms(EPOCH, handle_key(SECRET), LAYOUT, BLOCK_BYTES)
        self.book = LeaseBook(terms, TIMEOUTS, limits, counters)
        self.side = ContextSide(
            self.book,
            self._zmq.socket(zmq.ROUTER),
            backend,
            buffer_of(self._memories[0]),
            timeouts=TIMEOUTS,
            limits=limits,
            counters=counters,
            emit=self.events.append,
        )

    def serve(self, key: SequenceKey, now: float, deadline_s: float = 30.0) -> None:
        """Lease two blocks to a reader, and begin to write them."""
        handle = TransferHandle(
            version=TRANSFER_VERSION,
            epoch=EPOCH,
            key=key,
            address="tcp://127.0.0.1:1",
            layout=LAYOUT,
            blocks=2,
            expires_in_s=60.0,
        )
        request = Reserve(
            version=TRANSFER_VERSION,
            transfer_id=key.client_id,
            epoch=THEIR_EPOCH,
            handle=sign_handle(handle_key(SECRET), handle),
            positions=pack_tokens([0, 1]),
            blocks=pack_tokens([2, 3]),
            base=self._memories[1].ctypes.data,
            block_bytes=BLOCK_BYTES,
            num_blocks=16,
            peer_address=self.inlet.address,
            rkey=self.inlet.key,
            deadline_s=deadline_s,
        )
        self.side.carry_out(self.book.offer(key, [4, 5], 60.0, now), now)
        self.side.carry_out(self.book.receive(b"route", request, now), now)
        self.side.write(now)

    def close(self) -> None:
        """Free the sockets."""
        self._zmq.destroy(linger=0)


@pytest.fixture
def context() -> Iterator[Context]:
    """One context side."""
    made = Context()
    yield made
    made.close()


def test_leases_of_a_stuck_reader_end_together(context: Context) -> None:
    """A reader that stopped with several transfers under way: breaking its connection for the first ends them all."""
    start = time.monotonic()
    for key in (FIRST, SECOND, THIRD):
        context.serve(key, start)
    context.side.tick(start + TIMEOUTS.silence_s)
    context.side.write(start + TIMEOUTS.silence_s)
    assert context.events == []  # operations are still in flight
    context.side.tick(start + TIMEOUTS.silence_s + TIMEOUTS.stop_s)
    assert context.events == [LeaseEnded(key, TransferOutcome.FAILED) for key in (FIRST, SECOND, THIRD)]
    assert context.book.open_leases == 0
    assert not context.side.writing


def test_a_broken_connection_ends_a_lease_that_was_due_in_the_same_moment(context: Context) -> None:
    """One lease breaks the connection in the very tick in which another one's time is up."""
    start = time.monotonic()
    context.serve(FIRST, start, deadline_s=1.0)
    context.serve(SECOND, start, deadline_s=1.0 + TIMEOUTS.stop_s)
    context.side.tick(start + 1.0)
    context.side.tick(start + 1.0 + TIMEOUTS.stop_s)
    assert context.events == [
        LeaseEnded(FIRST, TransferOutcome.EXPIRED),
        LeaseEnded(SECOND, TransferOutcome.EXPIRED),
    ]
    assert context.book.open_leases == 0
