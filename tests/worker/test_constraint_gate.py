"""Requests with a constraint wait at the gate while it is compiled, and the loop serves all others."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from llguidance import LLTokenizer

from tests.support.engine_requests import make_request
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.constraint_compiler import ConstraintCompiler
from twostroke.protocol.constraint import Constraint, ConstraintKind
from twostroke.protocol.errors import InvalidRequestError, OverloadedError
from twostroke.protocol.requests import Abort, GenerationRequest
from twostroke.worker import constraint_gate
from twostroke.worker.constraint_gate import ConstraintGate


@dataclass
class SlowCompiler:
    """Compiles when the test says so."""

    real: ConstraintCompiler
    waiting: list[tuple[Constraint, "Future[TokenConstraint]"]] = field(default_factory=list)

    def start(self, constraint: Constraint, generated_ids: object) -> "Future[TokenConstraint]":
        """Wait."""
        del generated_ids
        future: Future[TokenConstraint] = Future()
        self.waiting.append((constraint, future))
        return future

    def finish(self, number: int) -> None:
        """Compile the one with that number."""
        constraint, future = self.waiting[number]
        try:
            future.set_result(self.real.start(constraint, ()).result(10))
        except InvalidRequestError as error:
            future.set_exception(error)


@dataclass
class Gate:
    """A gate with all around it."""

    now: float = 100.0
    wakes: int = 0

    def __post_init__(self) -> None:
        tokenizer = LLTokenizer(tiny_tokenizer().to_str(), n_vocab=VOCAB_SIZE)
        self.compiler = SlowCompiler(ConstraintCompiler(tokenizer, VOCAB_SIZE))
        self.gate = ConstraintGate(self.compiler, self._wake, lambda: self.now)  # type: ignore[arg-type] # a stand-in

    def _wake(self) -> None:
        self.wakes += 1


@pytest.fixture(name="one")
def one_gate() -> Gate:
    """A gate with nothing held."""
    return Gate()


def request(client_id: int, regex: str = "a", deadline_s: float | None = None) -> GenerationRequest:
    """A constrained request."""
    plain = make_request(client_id, [5], deadline_s=deadline_s)
    constraint = Constraint(ConstraintKind.REGEX, regex)
    return GenerationRequest(
        key=plain.key,
        prompt_ids=plain.prompt_ids,
        sampling=plain.sampling,
        constraint=constraint,
        deadline_s=deadline_s,
    )


def test_requests_leave_when_their_grammar_is_there(one: Gate) -> None:
    """One that compiles slowly holds no other up; the loop is woken for each."""
    for client_id in (1, 2):
        one.gate.hold(request(client_id))
    assert one.gate.client_ids() == {1, 2}
    assert one.gate.take_ready() == []
    one.compiler.finish(1)
    assert one.gate.ready
    assert one.wakes == 1
    [held] = one.gate.take_ready()
    assert held.request.key.client_id == 2
    assert isinstance(held.outcome(), TokenConstraint)
    assert (len(one.gate), one.gate.ready) == (1, False)


def test_a_wrong_grammar_is_that_request_s_error(one: Gate) -> None:
    """It leaves the gate too, with the reason."""
    one.gate.hold(request(1, regex="("))
    one.compiler.finish(0)
    [held] = one.gate.take_ready()
    assert isinstance(held.outcome(), InvalidRequestError)


def test_aborts_go_with_their_request(one: Gate) -> None:
    """What they end, the engine knows."""
    one.gate.hold(request(1))
    assert one.gate.abort(Abort(1, 3))
    assert not one.gate.abort(Abort(2))
    one.compiler.finish(0)
    [held] = one.gate.take_ready()
    assert held.aborts == [Abort(1, 3)]


def test_the_wait_counts_for_the_deadline(one: Gate) -> None:
    """A request that waited has less time left, but never less than none."""
    one.gate.hold(request(1, deadline_s=10.0))
    one.compiler.finish(0)
    [held] = one.gate.take_ready()
    assert held.remaining(104.0).deadline_s == 6.0
    assert held.remaining(200.0).deadline_s == 0.0


def test_a_worker_that_ends_takes_what_is_held(one: Gate) -> None:
    """Ready or not."""
    one.gate.hold(request(1))
    assert [held.request.key.client_id for held in one.gate.take_all()] == [1]
    assert len(one.gate) == 0


def test_the_gate_is_bounded(one: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused at once."""
    monkeypatch.setattr(constraint_gate, "MAX_HELD", 1)
    one.gate.hold(request(1))
    with pytest.raises(OverloadedError, match="1 requests wait for their grammar"):
        one.gate.hold(request(2))


def test_a_worker_without_a_vocabulary_refuses() -> None:
    """And says what is missing."""
    gate = ConstraintGate(None, lambda: None, lambda: 0.0)
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        gate.hold(request(1))
