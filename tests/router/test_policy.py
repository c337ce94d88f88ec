"""The policies, as arithmetic on loads."""

from collections import Counter

from router.policy import LeastLoaded, RoundRobin, estimated_load, make_policy
from twostroke.protocol.config import RoutingPolicy


def test_round_robin_takes_turns() -> None:
    """One after the other, whatever the load, also when a worker leaves."""
    policy = RoundRobin()
    assert [policy.choose([9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose([9, 0]) for _ in range(3)] == [1, 0, 1]


def test_least_loaded_takes_the_smallest() -> None:
    """The smallest load wins."""
    policy = LeastLoaded()
    assert policy.choose([3, 1, 2]) == 1
    assert policy.choose([3, 4, 2]) == 2


def test_least_loaded_shares_between_equals() -> None:
    """Equal workers take turns."""
    policy = LeastLoaded()
    assert [policy.choose([0, 0, 0]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_burst_between_two_heartbeats_is_spread() -> None:
    """Reports stay as they were; what the router sent since counts, so that not all goes to one worker."""
    policy = LeastLoaded()
    reported = [4, 0]
    sent = [0, 0]
    for _ in range(10):
        loads = [estimated_load(r, s, 0) for r, s in zip(reported, sent, strict=True)]
        sent[policy.choose(loads)] += 1
    assert sent == [3, 7]


def test_estimated_load() -> None:
    """Another router's work is in the report; a request that is still on its way is not, but this router knows it."""
    assert estimated_load(reported=10, in_flight=5, in_flight_when_reported=2) == 13
    assert estimated_load(reported=0, in_flight=2, in_flight_when_reported=2) == 2
    assert estimated_load(reported=6, in_flight=1, in_flight_when_reported=4) == 3


def test_configured_names() -> None:
    """Each name of the configuration makes its policy."""
    kinds = Counter(type(make_policy(name)) for name in RoutingPolicy)
    assert kinds == {RoundRobin: 1, LeastLoaded: 1}
