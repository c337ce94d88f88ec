"""Telling pauses of our own from the silence of others."""

from twostroke.ipc.pauses import OwnPauses


def test_a_gap_between_two_looks_is_a_pause_if_it_is_long() -> None:
    """Longer than half of what makes a peer dead; the time before the first look is nobody's."""
    pauses = OwnPauses(4.0)
    assert [pauses.look(now) for now in (100.0, 101.0, 103.0, 105.5, 105.6, 200.0)] == [0.0, 0.0, 0.0, 2.5, 0.0, 94.4]
