"""The I/O thread over a scripted endpoint: what it passes on, what it refuses, and its heartbeat."""

import queue
import threading
from collections import deque
from typing import cast

import pytest

from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.endpoint import Event, FrontendLost, Inbound, WorkerEndpoint
from twostroke.protocol.errors import ErrorKind, ProtocolError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import Abort, GenerationRequest
from twostroke.protocol.responses import FrontendBound, ResponseBatch, SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import LayoutFingerprint
from twostroke.protocol.worker import Heartbeat, InitProgress, InitStatus, Role, WorkerDescription, WorkerStopping
from twostroke.worker import inbox as inbox_module
from twostroke.worker.inbox import FrontendGone, Inbox, InboxItem, PartCrashed, Received
from twostroke.worker.io_thread import IoThread
from twostroke.worker.pulse import Pulse

EPOCH = 3
WAIT_S = 5.0
DESCRIPTION = WorkerDescription(
    role=Role.AGGREGATED,
    model="fake",
    max_model_len=16,
    vocab_size=10,
    eos_token_ids=(0,),
    num_blocks=4,
    max_sequences=2,
    layout=LayoutFingerprint("fake", "int64", 4, layers=1, kv_heads=1, head_dim=3),
)


class ScriptedEndpoint:
    """Hands out the events that a test puts in, and keeps what is sent."""

    def __init__(self) -> None:
        self.drops = DropCounters()
        self.events: deque[Event] = deque()
        self.sent: queue.Queue[tuple[int, FrontendBound]] = queue.Queue()
        self.broadcasts: queue.Queue[FrontendBound] = queue.Queue()
        self.reports: list[InitStatus] = []
        self.acknowledges = True
        self.broken: Exception | None = None
        self.closed = threading.Event()
        self.linger_s = 0.0
        self._woken = threading.Event()

    def put(self, *events: Event) -> None:
        """Let `events` arrive."""
        self.events.extend(events)
        self.wake()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait, and hand out."""
        self._woken.wait(timeout_s)
        self._woken.clear()
        if self.broken is not None:
            raise self.broken
        return [self.events.popleft() for _ in range(len(self.events))]

    def wake(self) -> None:
        """End the wait."""
        self._woken.set()

    def send(self, frontend_id: int, message: FrontendBound) -> bool:
        """Keep."""
        self.sent.put((frontend_id, message))
        return True

    def broadcast(self, message: FrontendBound) -> None:
        """Keep."""
        self.broadcasts.put(message)

    def report(self, status: InitStatus) -> None:
        """Keep, or fail as if nobody answered."""
        if not self.acknowledges:
            raise ProtocolError("the launcher did not acknowledge")
        self.reports.append(status)

    def describe(self, description: WorkerDescription) -> None:
        """Nobody attaches here."""

    def close(self, linger_s: float) -> None:
        """Tell the test."""
        self.linger_s = linger_s
        self.closed.set()


class Fixture:
    """An I/O thread with an inbox of one request."""

    def __init__(self) -> None:
        self.endpoint = ScriptedEndpoint()
        self.inbox = Inbox(capacity=1)
        self.pulse = Pulse()
        self.io = IoThread(cast("WorkerEndpoint", self.endpoint), EPOCH, self.inbox, self.pulse)
        self.io.start()

    def next_items(self) -> list[InboxItem]:
        """What arrives for the engine thread next."""
        return list(self.inbox.drain(WAIT_S))


@pytest.fixture
def thread() -> Fixture:
    """A started I/O thread; it is a daemon and may be left running."""
    return Fixture()


def make_request(counter: int) -> GenerationRequest:
    """Any request."""
    return GenerationRequest(
        key=SequenceKey(counter), prompt_ids=pack_tokens([1]), generated_ids=pack_tokens([2]), sampling=SamplingParams()
    )


def test_messages_reach_the_engine_thread_in_order(thread: Fixture) -> None:
    """An abort never overtakes its request, nor a lost frontend what it said before."""
    request, abort = make_request(1), Abort(1)
    thread.endpoint.put(Inbound(0, request), Inbound(0, abort), FrontendLost(0))
    items = thread.next_items()
    while len(items) < 3:
        items += thread.next_items()
    assert items == [Received(0, request), Received(0, abort), FrontendGone(0)]


def test_a_request_that_does_not_fit_is_refused_at_once(thread: Fixture) -> None:
    """The frontend is told to try again; the offset is that of the first token it would have got."""
    thread.endpoint.put(Inbound(0, make_request(1)), Inbound(0, make_request(2)))
    frontend_id, message = thread.endpoint.sent.get(timeout=WAIT_S)
    assert frontend_id == 0
    assert isinstance(message, ResponseBatch)
    (output,) = message.outputs
    assert (output.key, output.offset) == (SequenceKey(2), 1)
    assert output.error is not None
    assert output.error.kind is ErrorKind.OVERLOADED


def test_a_lost_frontend_is_never_forgotten(thread: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the inbox has no room, the news waits until it has."""
    monkeypatch.setattr(inbox_module, "CONTROL_ROOM", 0)
    thread.endpoint.put(Inbound(0, make_request(1)), FrontendLost(9))
    assert thread.next_items() == [Received(0, make_request(1))]
    assert thread.next_items() == [FrontendGone(9)]


def test_outputs_are_sent_as_they_come(thread: Fixture) -> None:
    """One message each, in order."""
    batches = [ResponseBatch(EPOCH, [SequenceOutput(SequenceKey(1), offset)]) for offset in range(3)]
    for batch in batches:
        thread.io.respond(5, batch)
    assert [thread.endpoint.sent.get(timeout=WAIT_S) for _ in batches] == [(5, batch) for batch in batches]


def test_heartbeats_begin_when_the_worker_is_ready(thread: Fixture) -> None:
    """They carry the epoch, the load and the count of dropped messages, and come by themselves."""
    assert thread.endpoint.broadcasts.empty()
    thread.endpoint.drops.count(DropReason.MALFORMED, 2)
    thread.io.serve(DESCRIPTION)
    for _ in range(2):
        beat = thread.endpoint.broadcasts.get(timeout=WAIT_S)
        assert isinstance(beat, Heartbeat)
        assert beat.epoch == EPOCH
        assert beat.load.counters.dropped_messages == 2


def test_a_report_waits_for_its_acknowledgement(thread: Fixture) -> None:
    """The future succeeds with it, and carries the error if nobody answers."""
    status = InitProgress(EPOCH, "loading")
    thread.io.report(status).result(WAIT_S)
    assert thread.endpoint.reports == [status]
    thread.endpoint.acknowledges = False
    with pytest.raises(ProtocolError):
        thread.io.report(status).result(WAIT_S)


def test_stopping_sends_everything_first(thread: Fixture) -> None:
    """Queued outputs, then the farewell with its reason, then the sockets close."""
    thread.io.respond(5, ResponseBatch(EPOCH, []))
    assert thread.io.stop("told to", WAIT_S)
    assert thread.endpoint.sent.get_nowait() == (5, ResponseBatch(EPOCH, []))
    assert thread.endpoint.broadcasts.get_nowait() == WorkerStopping(EPOCH, "told to")
    assert thread.endpoint.closed.is_set()
    assert thread.endpoint.linger_s > 0, "the farewell would be lost"


def test_a_crash_is_told_to_the_engine_thread(thread: Fixture) -> None:
    """The sockets are closed, and the engine thread ends the worker."""
    thread.endpoint.broken = OSError("no memory")
    thread.endpoint.wake()
    assert thread.endpoint.closed.wait(WAIT_S)
    (item,) = thread.next_items()
    assert isinstance(item, PartCrashed)
    assert item.part == "I/O thread"
    assert isinstance(item.error, OSError)
