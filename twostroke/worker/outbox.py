"""What the engine thread hands to the I/O thread: batches of responses, in order."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.protocol.responses import ResponseBatch

FULL_WAIT_S = 30.0
"""How long an outbox may stay full. The I/O thread never waits for a frontend, so it empties it at once or is stuck."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message for one frontend."""

    frontend_id: int
    batch: ResponseBatch


class OutboxStuckError(RuntimeError):
    """The I/O thread does not send any more; fatal to the worker."""


class Outbox:
    """A bounded queue from the engine thread to the I/O thread.

    Args:
        capacity: Messages that may wait at most.
        wake: Called after a message was put; thread-safe.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._messages: deque[Outgoing] = deque()
        self._capacity = capacity
        self._wake = wake
        self._room = threading.Condition()

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """Queue `batch`; waits for room.

        Raises:
            OutboxStuckError: There was no room for `FULL_WAIT_S`.
        """
        with self._room:
            if not self._room.wait_for(lambda: len(self._messages) < self._capacity, FULL_WAIT_S):
                raise OutboxStuckError(f"{self._capacity} messages wait, and none was sent for {FULL_WAIT_S:.0f} s")
            self._messages.append(Outgoing(frontend_id, batch))
        self._wake()

    def take(self) -> list[Outgoing]:
        """All waiting messages, oldest first; never waits."""
        with self._room:
            taken = list(self._messages)
            self._messages.clear()
            self._room.notify()
        return taken
