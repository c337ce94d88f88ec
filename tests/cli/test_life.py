"""The life of a supervised part: its transitions, when it is given up, and its back-off."""

import pytest

from twostroke.cli.up.life import IllegalMoveError, PartEvent, PartLife, PartState


def life_after(*events: PartEvent) -> PartLife:
    """A part that has seen these events."""
    life = PartLife()
    for event in events:
        life.move(event)
    return life


def test_a_part_becomes_ready_and_stops_when_asked() -> None:
    """The life of a part that nothing happens to."""
    life = life_after(PartEvent.SPAWNED, PartEvent.LOADING, PartEvent.ANSWERED)
    assert life.state is PartState.READY
    assert life.move(PartEvent.STOP) is PartState.STOPPING
    assert life.move(life.after_exit(0)) is PartState.STOPPED


def test_a_part_that_died_after_it_was_ready_is_started_again() -> None:
    """Whatever the exit status: its settings worked once."""
    for code in (-9, 0, 1, 2):
        life = life_after(PartEvent.SPAWNED, PartEvent.ANSWERED)
        assert life.move(life.after_exit(code)) is PartState.RESTARTING


def test_wrong_settings_end_a_part_at_once() -> None:
    """Exit status 2 at the start is a config error: starting again would say the same."""
    life = life_after(PartEvent.SPAWNED, PartEvent.LOADING)
    assert life.move(life.after_exit(2)) is PartState.FAILED


def test_a_part_that_never_answers_is_given_up_at_its_third_death() -> None:
    """Two further tries, for what may be chance."""
    life = PartLife()
    outcomes = []
    for _ in range(3):
        life.move(PartEvent.SPAWNED)
        outcomes.append(life.move(life.after_exit(1)))
    assert outcomes == [PartState.RESTARTING, PartState.RESTARTING, PartState.FAILED]


def test_back_off_doubles_to_ten_seconds_and_a_long_run_resets_it() -> None:
    """A short run does not: a part that dies right after it answered must not spin."""
    life = PartLife()
    delays = []
    for _ in range(7):
        life.move(PartEvent.SPAWNED)
        life.move(PartEvent.ANSWERED)
        life.forgive(ready_for_s=1.0)
        life.move(PartEvent.DIED)
        delays.append(life.delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    life.forgive(ready_for_s=30.0)
    life.move(PartEvent.SPAWNED)
    life.move(PartEvent.DIED)
    assert life.delay_s == 0.5


def test_stopping_while_waiting_for_a_restart_needs_no_exit() -> None:
    """There is no process to wait for."""
    life = life_after(PartEvent.SPAWNED, PartEvent.DIED)
    assert life.move(PartEvent.STOP) is PartState.STOPPED


def test_an_event_that_makes_no_sense_is_refused() -> None:
    """Such as an answer of a part that was never started."""
    with pytest.raises(IllegalMoveError, match="planned cannot take `answered`"):
        PartLife().move(PartEvent.ANSWERED)
