"""The bounded queue from the engine thread to the I/O thread."""

import pytest

from twostroke.protocol.responses import ResponseBatch
from twostroke.worker import outbox as outbox_module
from twostroke.worker.outbox import Outbox, OutboxStuckError, Outgoing


def test_messages_come_out_in_order_and_wake_the_reader() -> None:
    """One wake a message; taking empties the box."""
    wakes: list[None] = []
    outbox = Outbox(capacity=8, wake=lambda: wakes.append(None))
    batches = [ResponseBatch(epoch, []) for epoch in range(3)]
    for batch in batches:
        outbox.respond(4, batch)
    assert outbox.take() == [Outgoing(4, batch) for batch in batches]
    assert outbox.take() == []
    assert len(wakes) == 3


def test_a_reader_that_hangs_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thread waits for room for a while, then the worker ends."""
    monkeypatch.setattr(outbox_module, "FULL_WAIT_S", 0.01)
    outbox = Outbox(capacity=1, wake=lambda: None)
    outbox.respond(4, ResponseBatch(1, []))
    with pytest.raises(OutboxStuckError, match="1 messages wait"):
        outbox.respond(4, ResponseBatch(1, []))
