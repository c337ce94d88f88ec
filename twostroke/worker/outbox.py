"""What the engine thread hands to the I/O thread: batches of responses, in order."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
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

    Both ends rely on a deque's `append` and `popleft` being atomic, so that a message costs no lock. The message that
    finds the queue empty wakes the reader, and the reader itself does where it left some.

    Args:
        capacity: Messages that may wait at most.
        wake: Makes the reader call `take` soon; thread-safe.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._messages: deque[Outgoing] = deque()
        self._capacity = capacity
        self._wake = wake
        self._has_room = threading.Event()

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """Queue `batch`; waits for room.

        Raises:
            OutboxStuckError: There was no room for `FULL_WAIT_S`.
        """
        if len(self._messages) >= self._capacity:
            self._await_room()
        self._messages.append(Outgoing(frontend_id, batch))
        if len(self._messages) == 1:
            self._wake()

    def take(self) -> Iterator[Outgoing]:
        """The messages that wait now, oldest first; never waits. What comes meanwhile is left for the next call."""
        # A bound, since an engine of short steps could else keep the reader here, away from requests and heartbeats.
        for _ in range(len(self._messages)):
            yield self._messages.popleft()
            if not self._has_room.is_set():
                self._has_room.set()
        if self._messages:
            self._wake()

    def _await_room(self) -> None:
        self._has_room.clear()
        # Looked at again, since the reader may have taken the last message before it could see the cleared event.
        if len(self._messages) >= self._capacity and not self._has_room.wait(FULL_WAIT_S):
            raise OutboxStuckError(f"{self._capacity} messages wait, and none was sent for {FULL_WAIT_S:.0f} s")
