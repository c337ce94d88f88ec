"""A worker's endpoint and its launching frontend: sealed queues, what is dropped, what happens when nobody reads."""

from collections.abc import Iterator

import pytest
import zmq

from tests.support.endpoint_bench import LIMITS, Bench, endpoint_bench, output
from tests.support.scripted_worker import describe, make_request
from tests.support.worker_thread import launch_spec
from twostroke.ipc.codec import request_codec
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.endpoint import EndpointOptions, FrontendLost, Inbound, WorkerEndpoint
from twostroke.ipc.local_client import RequestSender, ResultReceiver
from twostroke.ipc.seal import Direction, Sealer
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import LAUNCHING_FRONTEND, SequenceKey
from twostroke.protocol.requests import (
    Abort,
    Drain,
    FrontendBeat,
    RequestEnvelope,
    WorkerBound,
)
from twostroke.protocol.responses import FrontendBound, ResponseBatch
from twostroke.protocol.worker import Heartbeat, InitProgress, WorkerLoad, WorkerReady, WorkerStopping


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An endpoint that admits frontends; a test sets other options by indirect parameters."""
    with endpoint_bench(getattr(request, "param", None)) as made:
        yield made


def test_a_local_request_arrives_as_the_launching_frontends(bench: Bench) -> None:
    """Sealed, in its envelope."""
    sender = RequestSender(bench.context, bench.spec, LIMITS)
    bench.on_close(sender.close)
    body = make_request(SequenceKey(5), [1, 2])
    assert sender.send(request_codec().encode(RequestEnvelope(bench.spec.epoch, body)), 1)
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [Inbound(LAUNCHING_FRONTEND, body)]
    assert bench.endpoint.drops.total == 0


@pytest.mark.parametrize(
    ("body", "epoch_shift", "reason"),
    [
        (Abort(7 << 48), 0, DropReason.FOREIGN_CLIENT_ID),
        (Abort(5), 1, DropReason.WRONG_EPOCH),
        (FrontendBeat(0), 0, DropReason.FORBIDDEN),
    ],
)
def test_a_local_message_out_of_place_is_dropped_and_counted(
    bench: Bench, body: WorkerBound, epoch_shift: int, reason: DropReason
) -> None:
    """Authentic, but for another epoch, in another's name, or meaningless there."""
    sender = RequestSender(bench.context, bench.spec, LIMITS)
    bench.on_close(sender.close)
    assert sender.send(request_codec().encode(RequestEnvelope(bench.spec.epoch + epoch_shift, body)), 1)
    bench.poll_until(lambda: bench.endpoint.drops[reason] == 1)
    assert bench.events == []
    assert bench.endpoint.drops.total == 1


def test_replayed_and_forged_local_messages_are_dropped_before_they_are_decoded(bench: Bench) -> None:
    """Raw frames: one good, the same again, one with another key, and one that is no message at all."""
    push = bench.context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    push.connect(bench.spec.request_address)
    bench.on_close(push.close)
    payload = request_codec().encode(RequestEnvelope(bench.spec.epoch, Drain()))
    sealer = Sealer(bench.spec.session, Direction.REQUEST)
    good = sealer.seal(payload)
    forged = [bytes(40), payload]
    for frames in (good, good, forged, [b"junk"], sealer.seal(b"\xc1")):
        push.send_multipart(frames)
    bench.poll_until(lambda: bench.endpoint.drops.total == 4)
    assert bench.events == [Inbound(LAUNCHING_FRONTEND, Drain())]
    for reason, count in ((DropReason.REPLAYED, 1), (DropReason.BAD_MAC, 1), (DropReason.MALFORMED, 2)):
        assert bench.endpoint.drops[reason] == count


def test_results_reach_the_launching_frontend_sealed(bench: Bench) -> None:
    """A broadcast and a batch, in order."""
    drops = DropCounters()
    receiver = ResultReceiver(bench.context, bench.spec, LIMITS, drops)
    bench.on_close(receiver.close)
    beat = Heartbeat(bench.spec.epoch, 0.5, WorkerLoad(running=3))
    batch = ResponseBatch(bench.spec.epoch, [output(LAUNCHING_FRONTEND)])
    got: list[FrontendBound] = []

    def arrived() -> bool:
        got.extend(receiver.receive(10))
        return len(got) >= 2

    def connected() -> bool:
        bench.endpoint.broadcast(beat)
        got.extend(receiver.receive(10))
        return bool(got)

    bench.poll_until(connected)
    assert bench.endpoint.send(LAUNCHING_FRONTEND, batch)
    bench.poll_until(lambda: arrived() and got[-1] == batch)
    assert set(map(type, got[:-1])) == {Heartbeat}
    assert drops.total == 0


def test_a_launching_frontend_that_reads_nothing_misses_results_once_and_is_told(bench: Bench) -> None:
    """Its queue overflows: later sends are refused, and when it reads again it hears why."""
    receiver = ResultReceiver(bench.context, bench.spec, LIMITS, DropCounters())
    bench.on_close(receiver.close)
    batch = ResponseBatch(bench.spec.epoch, [output(LAUNCHING_FRONTEND)] * 200)
    bench.poll_until(lambda: bench.endpoint._local.send(bench.endpoint._codec.encode(batch)))
    sent = 1
    while bench.endpoint.send(LAUNCHING_FRONTEND, batch):
        sent += 1
        assert sent < 100_000
    assert not bench.endpoint.send(LAUNCHING_FRONTEND, batch)
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [FrontendLost(LAUNCHING_FRONTEND)]
    got: list[FrontendBound] = []

    def told() -> bool:
        got.extend(receiver.receive(100))
        return bool(got) and isinstance(got[-1], WorkerStopping)

    bench.poll_until(told)
    assert len(got) == sent + 1
    assert bench.events == [FrontendLost(LAUNCHING_FRONTEND)]


def test_heartbeats_alone_never_break_the_local_queue(bench: Bench) -> None:
    """A frontend that has nothing pending may be slow to read them: they are skipped, nobody is lost."""
    beat = Heartbeat(bench.spec.epoch, 0.0, WorkerLoad())
    for _ in range(5 * LIMITS.messages):
        bench.endpoint.broadcast(beat)
    assert bench.endpoint.poll(0) == []


def test_a_launcher_that_does_not_acknowledge_is_noticed() -> None:
    """The report raises after its deadline instead of hanging."""
    with launch_spec(secret=None) as spec:
        endpoint = WorkerEndpoint(spec, EndpointOptions(ack_s=0.1))
        assert endpoint.address == ""
        with pytest.raises(ProtocolError, match=r"did not acknowledge InitProgress within 0\.1 s"):
            endpoint.report(InitProgress(spec.epoch, "loading"))
        endpoint.close()


def test_a_worker_without_a_reader_of_its_results_is_not_ready() -> None:
    """Whoever hears that it is ready may ask at once, and the answer must have somebody to go to."""
    with launch_spec(secret=None) as spec:
        endpoint = WorkerEndpoint(spec, EndpointOptions(ack_s=0.1))
        with pytest.raises(ProtocolError, match=r"did not connect to the result queue within 0\.1 s"):
            endpoint.report(WorkerReady(spec.epoch, describe(spec, endpoint.address)))
        endpoint.close()
