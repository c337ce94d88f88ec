"""Deadlines in order, without those of ended sequences."""

from twostroke.engine.deadlines import Deadlines


def test_overdue_ones_come_in_order_and_dropped_ones_never() -> None:
    """A deadline has passed at its very time."""
    deadlines = Deadlines()
    assert deadlines.pop_overdue(0.0) is None
    for request_id, at in ((1, 5.0), (2, 3.0), (3, 4.0), (4, 9.0)):
        deadlines.set(request_id, at)
    deadlines.drop(3)
    deadlines.drop(99)
    assert deadlines.pop_overdue(2.9) is None
    assert [deadlines.pop_overdue(5.0) for _ in range(3)] == [2, 1, None]
    deadlines.drop(4)
    assert deadlines.next is None


def test_entries_of_ended_sequences_do_not_pile_up() -> None:
    """A long deadline of a short request is forgotten with it."""
    deadlines = Deadlines()
    deadlines.set(0, 1.0)
    for request_id in range(1, 1000):
        deadlines.set(request_id, 600.0)
        deadlines.drop(request_id)
    assert len(deadlines._heap) <= 3
    assert deadlines.next == 1.0
