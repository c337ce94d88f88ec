"""Which worker gets the next request. Pure: a policy sees numbers and returns an index.

A worker's heartbeat is up to 250 ms old, and in a burst all requests of that time would go to the worker that looked
idle in it. So the load of a worker is what it reported plus what this router has sent to it since, and never less than
what this router knows to be there:

    load = max(in_flight, reported + in_flight - in_flight_when_reported)

Reports count every router's requests, `in_flight` only this one's.
"""

from collections.abc import Sequence
from typing import Protocol

from twostroke.protocol.config import RoutingPolicy


def estimated_load(reported: int, in_flight: int, in_flight_when_reported: int) -> int:
    """Load of one worker now, from its last report and this router's own count; see the module's formula."""
    return max(in_flight, reported + in_flight - in_flight_when_reported)


class Policy(Protocol):
    """Chooses among the workers that can take a request."""

    def choose(self, loads: Sequence[int]) -> int:
        """The index of the chosen worker.

        Args:
            loads: One load a worker, at least one, in the pool's stable order.
        """
        ...


class RoundRobin:
    """One after the other, whatever their load."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[int]) -> int:
        """The next in turn."""
        chosen = self._turn % len(loads)
        self._turn = chosen + 1
        return chosen


class LeastLoaded:
    """The smallest load; equals take turns, so that idle workers share."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[int]) -> int:
        """The first worker, counted from the turn on, with the smallest load."""
        count = len(loads)
        start = self._turn % count
        chosen = min(range(count), key=lambda index: (loads[index], (index - start) % count))
        self._turn = chosen + 1
        return chosen


def make_policy(policy: RoutingPolicy) -> Policy:
    """The policy that the configuration names."""
    return RoundRobin() if policy is RoutingPolicy.ROUND_ROBIN else LeastLoaded()
