"""How long things took, counted by size, and the parts of a hand-over that are counted so.

    end of prefill                                                                        first decode step
    | context:     lease_wait .............. | first_put | write | flush |
    | generation:             | reserve | transfer ........................... | first_step |

`lease_wait` holds the way of the hand-over through the router, and all of `reserve`; `transfer` is longer than the
three parts of the writer by the two control messages around them.
"""

import bisect
import enum

import msgspec

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds; a last bucket takes what is longer."""


class HandoverPart(enum.StrEnum):
    """A stretch between two moments of one worker.

    On the context worker: `LEASE_WAIT` from the lease to the reservation, `FIRST_PUT` until the first writes are
    issued, `WRITE` until the last ones are, `FLUSH` until all have landed. On the generation worker: `RESERVE` from the
    request until its blocks are reserved and asked for, `TRANSFER` until the engine knows that all have landed,
    `FIRST_STEP` until the end of the engine step that it joins.
    """

    LEASE_WAIT = "lease_wait"
    FIRST_PUT = "first_put"
    WRITE = "write"
    FLUSH = "flush"
    RESERVE = "reserve"
    TRANSFER = "transfer"
    FIRST_STEP = "first_step"


class DurationHistogram(msgspec.Struct, array_like=True):
    """Durations by size, since the start.

    Attributes:
        counts: How many fell into each bucket, the one without bound included.
        sum_s: Of all of them.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> "DurationHistogram":
        """As it is now, for another thread; taken while the owner counts it may lack the last duration's sum."""
        return DurationHistogram(list(self.counts), self.sum_s)


HandoverTimes = dict[HandoverPart, DurationHistogram]
"""Of the parts that a worker's role knows."""


def copy_times(times: HandoverTimes) -> HandoverTimes:
    """A copy for another thread; the keys of `times` never change."""
    return {part: histogram.copy() for part, histogram in times.items()}
