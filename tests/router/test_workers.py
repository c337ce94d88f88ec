"""The states of one worker address, and what is counted on an attached worker."""

import pytest

from router.workers import TRANSITIONS, AttachedWorker, WorkerSlot, WorkerState, judge
from tests.support.fake_remote import FakeWorker, describe
from twostroke.protocol.worker import Role, WorkerLoad

S = WorkerState
ALLOWED = {
    (S.ATTACHING, S.LIVE),
    (S.ATTACHING, S.DEAD),
    (S.LIVE, S.SUSPECT),
    (S.LIVE, S.DEAD),
    (S.SUSPECT, S.LIVE),
    (S.SUSPECT, S.DEAD),
    (S.DEAD, S.ATTACHING),
}


@pytest.mark.parametrize("start", list(S))
@pytest.mark.parametrize("target", list(S))
def test_every_pair_of_states(start: WorkerState, target: WorkerState) -> None:
    """Exactly the drawn transitions are allowed."""
    slot = WorkerSlot("tcp://c:1", Role.CONTEXT, "tcp://c:1", state=start)
    assert (target in TRANSITIONS[start]) == ((start, target) in ALLOWED)
    if (start, target) in ALLOWED:
        slot.move(target, "why")
        assert (slot.state, slot.reason) == (target, "why")
    else:
        with pytest.raises(ValueError, match=f"cannot go from {start} to {target}"):
            slot.move(target)


def test_silence_and_death() -> None:
    """Silence makes a worker suspect, a word from it live again, a dead link dead for good."""
    link = FakeWorker(describe(Role.CONTEXT))
    slot = WorkerSlot("tcp://c:1", Role.CONTEXT, "tcp://c:1")
    slot.attached(link)
    states = []
    for silence_s in (0.1, 2.0, 0.1, 3.0):
        link.silence_s = silence_s
        states.append(slot.refresh(suspect_after_s=2.0))
    assert states == [S.LIVE, S.SUSPECT, S.LIVE, S.SUSPECT]
    link.die("out of memory")
    assert slot.refresh(suspect_after_s=2.0) is S.DEAD
    assert slot.reason == "out of memory"
    link.dead = None
    assert slot.refresh(suspect_after_s=2.0) is S.DEAD
    slot.left()
    assert (slot.state, slot.worker) == (S.ATTACHING, None)


def test_judge_says_why() -> None:
    """The reason carries the number that made it so."""
    link = FakeWorker(describe(Role.CONTEXT), silence_s=2.5)
    assert judge(link, suspect_after_s=2.0) == (S.SUSPECT, "silent for 2.5 s")


def test_context_load_counts_tokens_and_generation_load_sequences() -> None:
    """A long prompt weighs on a context worker; a generation worker's step depends on how many sequences it runs."""
    report = WorkerLoad(running=3, waiting=2, waiting_tokens=100)
    context = AttachedWorker("tcp://c:1", FakeWorker(describe(Role.CONTEXT), load=report))
    generation = AttachedWorker("tcp://g:1", FakeWorker(describe(Role.GENERATION), load=report))
    assert (context.estimate(), generation.estimate()) == (100, 5)
    context.claim(40)
    generation.claim(40)
    assert (context.estimate(), generation.estimate()) == (140, 6)


def test_a_new_report_replaces_the_count_since_the_last() -> None:
    """What was sent before a heartbeat is in it."""
    link = FakeWorker(describe(Role.GENERATION), load=WorkerLoad(running=2))
    worker = AttachedWorker("tcp://g:1", link)
    assert worker.estimate() == 2
    first, _ = worker.claim(4), worker.claim(4)
    assert worker.estimate() == 4
    link.load = WorkerLoad(running=4)
    assert worker.estimate() == 4
    first.release()
    first.release()
    assert (worker.estimate(), worker.sequences, worker.tokens) == (3, 1, 4)
