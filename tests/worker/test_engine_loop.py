"""The engine loop over an instant runner: what comes in, what goes out, and how it stops."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.engine_requests import handed_over
from tests.support.engine_requests import make_request as engine_request
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.errors import ErrorKind
from twostroke.protocol.ids import COUNTER_BITS, SequenceKey
from twostroke.protocol.requests import Abort, Drain, GenerationRequest, Phase, Shutdown
from twostroke.protocol.responses import FinishReason, ResponseBatch, SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens, unpack_tokens
from twostroke.protocol.worker import Role
from twostroke.worker.engine_loop import EngineLoop, LoopStage, PartCrashedError
from twostroke.worker.inbox import FrontendGone, Inbox, PartCrashed, Received, Terminate
from twostroke.worker.pulse import Pulse
from twostroke.worker.role_part import AggregatedPart

EPOCH = 7


@dataclass
class Clock:
    """A clock that tests move by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@dataclass
class Recorder:
    """Takes the loop's messages, and calls `on_batch` after each."""

    batches: list[tuple[int, ResponseBatch]] = field(default_factory=list)
    on_batch: Callable[[], None] = lambda: None

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """See `Responder`."""
        self.batches.append((frontend_id, batch))
        self.on_batch()

    def outputs(self, key: SequenceKey) -> list[SequenceOutput]:
        """Everything about one sequence."""
        return [output for _, batch in self.batches for output in batch.outputs if output.key == key]

    def tokens(self, key: SequenceKey) -> list[int]:
        """All tokens of one sequence."""
        return [token for output in self.outputs(key) for token in unpack_tokens(output.token_ids)]


@dataclass
class Worker:
    """One loop and all around it."""

    runner: FakeRunner = field(default_factory=FakeRunner)
    config: EngineConfig = field(default_factory=EngineConfig)
    clock: Clock = field(default_factory=Clock)
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.engine = Engine(self.runner, self.config, Role.AGGREGATED, self.clock)
        self.inbox = Inbox(16)
        self.pulse = Pulse(self.clock)
        self.loop = EngineLoop(
            engine=self.engine,
            role_part=AggregatedPart(),
            epoch=EPOCH,
            inbox=self.inbox,
            responder=self.recorder,
            pulse=self.pulse,
            clock=self.clock,
        )

    def receive(self, body: GenerationRequest | Abort | Drain | Shutdown, frontend_id: int = 0) -> None:
        """Put a message into the inbox."""
        item = Received(frontend_id, body)
        taken = (
            self.inbox.offer_request(item) if isinstance(body, GenerationRequest) else self.inbox.offer_control(item)
        )
        assert taken

    def run_dry(self) -> None:
        """Run until all requests have ended."""
        self.inbox.stop(Terminate(1000.0))
        self.loop.run()


class DeafPart(AggregatedPart):
    """A role part to which no transfer ever answers."""

    def check(self, request: GenerationRequest) -> None:
        """Everything is accepted."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker whose blocks must all be free or cached in the end."""
    worker = Worker()
    yield worker
    worker.engine.check()
    counts = worker.engine.load().blocks
    assert counts.free + counts.cached == counts.total == worker.runner.num_blocks


def make_request(
    counter: int = 1,
    frontend_id: int = 0,
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    phase: Phase = Phase.FULL,
    deadline_s: float | None = None,
    max_tokens: int = 4,
) -> GenerationRequest:
    """A greedy request of `frontend_id`."""
    return GenerationRequest(
        key=SequenceKey((frontend_id << COUNTER_BITS) | counter),
        prompt_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        phase=phase,
        deadline_s=deadline_s,
    )


def test_a_request_is_answered_token_by_token(worker: Worker) -> None:
    """One message a step, offsets without gap, the finish reason in the last; all with the worker's epoch."""
    request = make_request()
    worker.receive(request)
    worker.run_dry()
    outputs = worker.recorder.outputs(request.key)
    assert [output.offset for output in outputs] == [0, 1, 2, 3]
    assert worker.recorder.tokens(request.key) == expected_output((5, 6, 7), 4, worker.runner.vocab_size)
    assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]
    assert {batch.epoch for _, batch in worker.recorder.batches} == {EPOCH}


def test_one_message_a_step_and_frontend(worker: Worker) -> None:
    """Outputs of one step travel together, apart by frontend."""
    requests = [make_request(counter, frontend_id) for frontend_id in (0, 9) for counter in (1, 2, 3)]
    for request in requests:
        worker.receive(request, request.key.client_id >> COUNTER_BITS)
    worker.run_dry()
    assert [(frontend_id, len(batch.outputs)) for frontend_id, batch in worker.recorder.batches] == [(0, 3), (9, 3)] * 4


def test_a_bad_request_ends_alone(worker: Worker) -> None:
    """A request error is answered with its kind and field, and the others go on."""
    bad, good = make_request(1, prompt=(99_999,)), make_request(2)
    worker.receive(bad)
    worker.receive(good)
    worker.run_dry()
    (refusal,) = worker.recorder.outputs(bad.key)
    assert refusal.error is not None
    assert (refusal.error.kind, refusal.error.param) == (ErrorKind.INVALID, "prompt")
    assert len(worker.recorder.tokens(good.key)) == 4


def test_a_worker_without_role_runs_whole_requests_only(worker: Worker) -> None:
    """A context_only request is refused with the phases that would be run."""
    request = make_request(phase=Phase.CONTEXT_ONLY)
    worker.receive(request)
    worker.run_dry()
    (refusal,) = worker.recorder.outputs(request.key)
    assert refusal.error is not None
    assert refusal.error.param == "phase"
    assert "aggregated" in refusal.error.message


def test_an_abort_ends_its_request(worker: Worker) -> None:
    """The aborted request gets one final ABORTED event; a second abort, and one of an unknown request, do nothing."""
    request = make_request(max_tokens=100)
    worker.receive(request)
    for _ in range(2):
        worker.receive(Abort(request.key.client_id))
    worker.receive(Abort(12345))
    worker.run_dry()
    (output,) = worker.recorder.outputs(request.key)
    assert output.error is not None
    assert output.error.kind is ErrorKind.ABORTED


def test_a_lost_frontend_takes_its_requests_along(worker: Worker) -> None:
    """Only the requests of the frontend that is gone end early."""
    lost, other = make_request(1, 3, max_tokens=100), make_request(1, 4)
    worker.receive(lost, 3)
    worker.receive(other, 4)
    assert worker.inbox.offer_control(FrontendGone(3))
    worker.run_dry()
    (output,) = worker.recorder.outputs(lost.key)
    assert output.error is not None
    assert output.error.kind is ErrorKind.ABORTED
    assert len(worker.recorder.tokens(other.key)) == 4


def test_a_deadline_ends_a_request(worker: Worker) -> None:
    """A request whose time is up gets DEADLINE as its final event."""
    request = make_request(deadline_s=5.0, max_tokens=100)
    worker.receive(request)

    def pass_time() -> None:
        worker.clock.now += 2.0

    worker.recorder.on_batch = pass_time
    worker.run_dry()
    outputs = worker.recorder.outputs(request.key)
    assert outputs[-1].error is not None
    assert outputs[-1].error.kind is ErrorKind.DEADLINE
    assert len(worker.recorder.tokens(request.key)) == 3


def test_draining_refuses_new_requests_and_finishes_old_ones(worker: Worker) -> None:
    """After `Drain` a new request is refused as overloaded, and the load says that the worker does not admit."""
    old, new = make_request(1), make_request(2)
    for body in (old, Drain(), new):
        worker.receive(body)
    worker.run_dry()
    (refusal,) = worker.recorder.outputs(new.key)
    assert refusal.error is not None
    assert refusal.error.kind is ErrorKind.OVERLOADED
    assert len(worker.recorder.tokens(old.key)) == 4
    assert not worker.pulse.load.admitting


def test_shutdown_aborts_its_senders_requests_and_finishes_the_others(worker: Worker) -> None:
    """The launching frontend failed its own requests before; those of attached frontends may end well."""
    own, attached = make_request(1, 0, max_tokens=100), make_request(1, 5)
    worker.receive(own, 0)
    worker.receive(attached, 5)
    worker.receive(Shutdown(60.0), 0)
    worker.loop.run()
    assert worker.recorder.outputs(own.key)[-1].error is not None
    assert len(worker.recorder.tokens(attached.key)) == 4
    assert worker.loop.stage is LoopStage.STOPPED


def test_shutdown_gives_up_what_is_left_at_its_deadline(worker: Worker) -> None:
    """Requests that outlast the deadline get a final event, and a share of the time is left for closing."""
    request = make_request(max_tokens=200)
    worker.receive(request)
    worker.inbox.stop(Terminate(10.0))

    def pass_time() -> None:
        worker.clock.now += 1.0

    worker.recorder.on_batch = pass_time
    worker.loop.run()
    outputs = worker.recorder.outputs(request.key)
    assert len(worker.recorder.tokens(request.key)) == 8
    assert outputs[-1].error is not None
    assert outputs[-1].error.kind is ErrorKind.ABORTED
    assert worker.loop.closing_s > 0


def test_a_crash_of_the_engine_leaves_the_loop(worker: Worker) -> None:
    """An exception of the runner is fatal: `run` raises it."""
    worker.runner.error = RuntimeError("out of memory")
    worker.receive(make_request())
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.run_dry()
    worker.runner.error = None
    worker.engine.abort(make_request().key.client_id)


def test_a_crash_of_another_thread_ends_the_loop(worker: Worker) -> None:
    """The loop names the part that crashed and keeps the cause."""
    worker.inbox.stop(PartCrashed("I/O thread", OSError("no sockets left")))
    with pytest.raises(PartCrashedError, match="I/O thread crashed: OSError") as caught:
        worker.loop.run()
    assert isinstance(caught.value.__cause__, OSError)


def test_the_pulse_tells_a_hanging_step_from_a_resting_loop() -> None:
    """The age grows from the last round on, and is 0 while the loop waits for work."""
    clock = Clock()
    pulse = Pulse(clock)
    clock.now += 3.0
    assert pulse.age_s == 3.0
    pulse.rest()
    assert pulse.age_s == 0.0
    pulse.resume()
    clock.now += 1.5
    assert pulse.age_s == 1.5


def test_the_inbox_refuses_requests_first() -> None:
    """A full inbox has room left for aborts, and always for the reason to stop."""
    inbox = Inbox(capacity=1)
    assert inbox.offer_request(Received(0, make_request(1)))
    assert not inbox.offer_request(Received(0, make_request(2)))
    assert inbox.offer_control(Received(0, Abort(1)))
    inbox.stop(Terminate(1.0))
    assert len(list(inbox.drain(0))) == 3


def test_wakes_are_coalesced() -> None:
    """Any number of wakes before a round count as one, and a later one wakes anew."""
    inbox = Inbox(capacity=1)
    for _ in range(5):
        inbox.wake()
    assert len(list(inbox.drain(0))) == 1
    inbox.wake()
    assert len(list(inbox.drain(0))) == 1


def test_the_loop_wakes_for_a_deadline_when_nothing_else_happens() -> None:
    """A hand-over whose blocks never arrive gives the loop no work; its deadline ends it all the same."""
    runner = FakeRunner()
    engine = Engine(runner, EngineConfig(), Role.GENERATION)
    recorder = Recorder()
    inbox = Inbox(16)
    loop = EngineLoop(engine=engine, role_part=DeafPart(), epoch=EPOCH, inbox=inbox, responder=recorder, pulse=Pulse())
    request = handed_over(engine_request(1, [5, 6, 7], deadline_s=0.3), [9], blocks=1)
    recorder.on_batch = lambda: inbox.stop(Terminate(0.1))
    assert inbox.offer_request(Received(0, request))
    loop.run()
    (output,) = recorder.outputs(request.key)
    assert output.error is not None
    assert output.error.kind is ErrorKind.DEADLINE
    assert runner.plans == []
