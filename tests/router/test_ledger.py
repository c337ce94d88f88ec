"""The ledger: which phases may follow which, and what is kept."""

import pytest

from router.ledger import ENDED, TRANSITIONS, Ledger, LedgerPhase

P = LedgerPhase
ALLOWED = {
    (P.QUEUED, P.CONTEXT),
    (P.CONTEXT, P.QUEUED),
    (P.CONTEXT, P.HANDOFF),
    (P.CONTEXT, P.GENERATION),
    (P.CONTEXT, P.DONE),
    (P.HANDOFF, P.GENERATION),
    (P.HANDOFF, P.DONE),
    (P.GENERATION, P.DONE),
    *((phase, end) for phase in (P.QUEUED, P.CONTEXT, P.HANDOFF, P.GENERATION) for end in (P.FAILED, P.CANCELLED)),
}
PATHS = {
    P.QUEUED: (),
    P.CONTEXT: (P.CONTEXT,),
    P.HANDOFF: (P.CONTEXT, P.HANDOFF),
    P.GENERATION: (P.CONTEXT, P.HANDOFF, P.GENERATION),
    P.DONE: (P.CONTEXT, P.DONE),
    P.FAILED: (P.FAILED,),
    P.CANCELLED: (P.CANCELLED,),
}


@pytest.mark.parametrize("start", list(P))
@pytest.mark.parametrize("target", list(P))
def test_every_pair_of_phases(start: LedgerPhase, target: LedgerPhase) -> None:
    """Exactly the drawn transitions are allowed; all others raise and change nothing."""
    ledger = Ledger(clock=lambda: 0.0)
    entry = ledger.open(1, prompt_tokens=3)
    for phase in PATHS[start]:
        ledger.move(entry, phase)
    if (start, target) in ALLOWED:
        ledger.move(entry, target)
        assert entry.phase is target
    else:
        with pytest.raises(ValueError, match=f"cannot go from {start} to {target}"):
            ledger.move(entry, target)
        assert entry.phase is start


def test_the_table_covers_every_phase() -> None:
    """A phase that is forgotten in the table would raise KeyError in the middle of a request."""
    assert set(TRANSITIONS) == set(P)
    assert {phase for phase, after in TRANSITIONS.items() if not after} == ENDED


def test_times_and_counts() -> None:
    """Each move keeps when it happened and returns how long the phase before took."""
    now = [10.0]
    ledger = Ledger(clock=lambda: now[0])
    entry = ledger.open(1, prompt_tokens=3)
    now[0] = 11.5
    assert ledger.move(entry, P.CONTEXT) == 1.5
    assert ledger.open_counts() == {P.CONTEXT: 1}
    now[0] = 12.0
    ledger.move(entry, P.DONE)
    assert [(move.phase, move.at_s) for move in entry.moves] == [(P.QUEUED, 10.0), (P.CONTEXT, 11.5), (P.DONE, 12.0)]
    assert len(ledger) == 0
    assert ledger.ended_counts() == {P.DONE: 1}


def test_history_is_bounded_and_latest_first() -> None:
    """Only the last ended entries are kept; counts go on."""
    ledger = Ledger(clock=lambda: 0.0, history=2)
    for client_id in (1, 2, 3):
        ledger.move(ledger.open(client_id, prompt_tokens=1), P.CANCELLED)
    assert [entry.client_id for entry in ledger.ended_entries()] == [3, 2]
    assert ledger.ended_counts()[P.CANCELLED] == 3


def test_a_client_id_is_open_once() -> None:
    """A second open entry under the same client id is refused; after the end the id is free."""
    ledger = Ledger(clock=lambda: 0.0)
    entry = ledger.open(1, prompt_tokens=1)
    with pytest.raises(ValueError, match="in the ledger already"):
        ledger.open(1, prompt_tokens=1)
    ledger.move(entry, P.FAILED)
    ledger.open(1, prompt_tokens=1)
