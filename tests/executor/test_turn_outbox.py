"""Messages that leave together at the end of a turn of the loop."""

import asyncio
from collections.abc import Sequence

from twostroke.executor.turn_outbox import TurnOutbox
from twostroke.ipc.codec import MAX_BUNDLE


class Wire:
    """A socket that may be full.

    Attributes:
        sent: The bundles.
        room: How many more bundles it takes.
    """

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.sent: list[list[bytes]] = []
        self.outbox = TurnOutbox(asyncio.get_running_loop(), self.send, self.turn)
        self.turns = 0

    def send(self, payloads: Sequence[bytes]) -> bool:
        """Take one bundle."""
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(list(payloads))
        return True

    def turn(self) -> None:
        """The end of a turn."""
        self.turns += 1
        self.outbox.flush()


async def test_what_is_posted_in_one_turn_leaves_as_one_bundle() -> None:
    """In order; more than a bundle holds leaves as several, in the same turn."""
    wire = Wire()
    messages = [b"%d" % number for number in range(MAX_BUNDLE + 2)]
    for message in messages:
        wire.outbox.post(message)
    assert wire.sent == []
    assert not wire.outbox.stuck
    await asyncio.sleep(0)
    assert wire.sent == [messages[:MAX_BUNDLE], messages[MAX_BUNDLE:]]
    wire.outbox.post(b"later")
    await asyncio.sleep(0)
    assert wire.sent[2:] == [[b"later"]]
    assert wire.turns == 2


async def test_what_a_full_socket_does_not_take_waits_in_order() -> None:
    """It is stuck until a flush, which the next turn is too."""
    wire = Wire(room=0)
    wire.outbox.post(b"first")
    await asyncio.sleep(0)
    assert (len(wire.outbox), wire.outbox.stuck) == (1, True)
    assert not wire.outbox.flush()
    wire.room = 1
    wire.outbox.post(b"second")
    assert not wire.outbox.stuck
    await asyncio.sleep(0)
    assert wire.sent == [[b"first", b"second"]]
    assert (len(wire.outbox), wire.outbox.stuck) == (0, False)


async def test_what_is_cleared_is_not_sent() -> None:
    """The attachment has ended."""
    wire = Wire()
    wire.outbox.post(b"never")
    wire.outbox.clear()
    await asyncio.sleep(0)
    assert wire.sent == []
