"""The bounded queue from the engine thread to the I/O thread."""

import threading

import pytest

from twostroke.protocol.responses import ResponseBatch
from twostroke.worker import outbox as outbox_module
from twostroke.worker.outbox import Outbox, OutboxStuckError, Outgoing


def test_messages_come_out_in_order_and_wake_the_reader() -> None:
    """The reader is woken when there is something again, not for each message; taking empties the box."""
    wakes: list[None] = []
    outbox = Outbox(capacity=8, wake=lambda: wakes.append(None))
    batches = [ResponseBatch(epoch, []) for epoch in range(3)]
    for batch in batches:
        outbox.respond(4, batch)
    assert len(wakes) == 1
    assert list(outbox.take()) == [Outgoing(4, batch) for batch in batches]
    assert list(outbox.take()) == []
    outbox.respond(4, batches[0])
    assert len(wakes) == 2


def test_what_is_written_while_the_reader_takes_wakes_it_anew() -> None:
    """A fast engine cannot keep the reader from its other work, and nothing stays behind unnoticed."""
    wakes: list[None] = []
    outbox = Outbox(capacity=8, wake=lambda: wakes.append(None))
    first, second = (Outgoing(4, ResponseBatch(epoch, [])) for epoch in range(2))
    outbox.respond(4, first.batch)
    taking = outbox.take()
    assert next(taking) == first
    outbox.respond(4, second.batch)
    wakes.clear()
    assert list(taking) == []
    assert len(wakes) == 1
    assert list(outbox.take()) == [second]


def test_a_writer_goes_on_when_there_is_room_again() -> None:
    """A full box holds the writer up until the reader takes something; no message is lost or woken for in vain."""
    woken = threading.Event()
    outbox = Outbox(capacity=2, wake=woken.set)
    batches = [ResponseBatch(epoch, []) for epoch in range(2000)]

    def write() -> None:
        for batch in batches:
            outbox.respond(4, batch)

    writer = threading.Thread(target=write)
    writer.start()
    taken: list[Outgoing] = []
    while len(taken) < len(batches):
        assert woken.wait(10)
        woken.clear()
        taken += outbox.take()
    writer.join(10)
    assert taken == [Outgoing(4, batch) for batch in batches]


def test_a_reader_that_hangs_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thread waits for room for a while, then the worker ends."""
    monkeypatch.setattr(outbox_module, "FULL_WAIT_S", 0.01)
    outbox = Outbox(capacity=1, wake=lambda: None)
    outbox.respond(4, ResponseBatch(1, []))
    with pytest.raises(OutboxStuckError, match="1 messages wait"):
        outbox.respond(4, ResponseBatch(1, []))
