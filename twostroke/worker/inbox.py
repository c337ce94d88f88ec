"""Everything that reaches the engine thread, through one queue, in order.

    I/O thread          requests, aborts, lost frontends, drain and shutdown
    transfer thread     `wake`: an event waits at the agent
    signal handler      shutdown (SIGTERM)

One queue means that an abort never overtakes its request, and that the engine thread has one place to wait.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.protocol.requests import Abort, Drain, GenerationRequest, Shutdown

CONTROL_ROOM = 4096
"""How many aborts and other control messages fit beside the requests."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a frontend."""

    frontend_id: int
    body: GenerationRequest | Abort | Drain | Shutdown


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A frontend left, fell silent, or cannot take its responses; nobody waits for its requests any more."""

    frontend_id: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """The system asks this worker to end (SIGTERM): finish what runs within `deadline_s`."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class PartCrashed:
    """Another thread of this worker ended with an error, so the worker must end too."""

    part: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing but a reason to go round."""


InboxItem = Received | FrontendGone | Terminate | PartCrashed | Wake


class Inbox:
    """The engine thread's bounded queue.

    `queue.SimpleQueue` is used because its `put` may be called from a signal handler at any point of the engine thread.

    Args:
        capacity: Requests that may wait here at most.
    """

    def __init__(self, capacity: int) -> None:
        self._items: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self._capacity = capacity
        self._woken = threading.Event()

    def offer_request(self, item: Received) -> bool:
        """Queue a request; False if there is no room, and the caller must refuse it."""
        return self._offer(item, self._capacity)

    def offer_control(self, item: Received | FrontendGone) -> bool:
        """Queue anything else, for which room is left beside the requests; False if even that is used up."""
        return self._offer(item, self._capacity + CONTROL_ROOM)

    def stop(self, item: Terminate | PartCrashed) -> None:
        """Queue the reason why this worker ends; always taken. Safe in a signal handler."""
        self._items.put(item)

    def wake(self) -> None:
        """Make the engine thread go round; any number of calls before it does count as one."""
        if not self._woken.is_set():
            self._woken.set()
            self._items.put(Wake())

    def drain(self, timeout_s: float | None) -> Iterator[InboxItem]:
        """Wait for the first item up to `timeout_s` (None: for ever; 0: not at all), then yield all that are there."""
        if timeout_s == 0 and self._items.empty():
            return
        try:
            yield self._items.get(block=timeout_s != 0, timeout=timeout_s)
            # Cleared before the waker's events are looked at, so that an event queued later wakes anew.
            self._woken.clear()
            for _ in range(self._items.qsize()):
                yield self._items.get_nowait()
        except queue.Empty:
            return

    def _offer(self, item: InboxItem, limit: int) -> bool:
        # Threads that offer at the same moment may pass the limit together, by no more than they are.
        if self._items.qsize() >= limit:
            return False
        self._items.put(item)
        return True
