"""A worker's endpoint: who gets through, what is dropped and counted, who is lost. Both ends are real sockets."""

import random
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.support.scripted_worker import describe, make_request
from tests.support.worker_thread import SECRET, launch_spec
from twostroke.ipc.attach_client import AttachClient
from twostroke.ipc.codec import MAX_MESSAGE_BYTES, request_codec
from twostroke.ipc.curve import secure_client
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.endpoint import EndpointOptions, Event, FrontendLost, Inbound, WorkerEndpoint
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.local_client import RequestSender, ResultReceiver
from twostroke.ipc.seal import Direction, Sealer
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.errors import ConfigError, ProtocolError
from twostroke.protocol.ids import LAUNCHING_FRONTEND, SequenceKey
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Detach,
    Drain,
    FrontendBeat,
    RequestEnvelope,
    Shutdown,
    WorkerBound,
)
from twostroke.protocol.responses import FrontendBound, ResponseBatch, SequenceOutput
from twostroke.protocol.worker import Attached, AttachRefused, Heartbeat, InitProgress, WorkerLoad, WorkerStopping

DEADLINE_S = 5.0
LIMITS = QueueLimits(messages=64)


class Bench:
    """One endpoint and the peers that a test gives it; everything runs on the test's thread."""

    def __init__(self, spec: LaunchSpec, options: EndpointOptions) -> None:
        self.spec = spec
        self.endpoint = WorkerEndpoint(spec, options)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events: list[Event] = []
        self._closers: list[Callable[[], None]] = []

    def poll_until(self, met: Callable[[], bool]) -> None:
        """Poll the endpoint until `met`; fails after the deadline."""
        ends_at = time.monotonic() + DEADLINE_S
        while not met():
            assert time.monotonic() < ends_at, f"did not happen; got {self.events}, dropped {self.endpoint.drops.total}"
            self.events += self.endpoint.poll(0.01)

    def frontend(self, frontend_id: int, limits: QueueLimits = LIMITS) -> "Frontend":
        """A frontend that has attached."""
        frontend = Frontend(self, limits)
        frontend.send(Attach(PROTOCOL_VERSION, frontend_id), epoch=0)
        self.poll_until(lambda: bool(frontend.messages()))
        return frontend

    def raw_dealer(self) -> "zmq.Socket[bytes]":
        """A socket with the cluster's key that may send anything."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        secure_client(dealer, SECRET)
        dealer.connect(self.endpoint.address)
        self.on_close(dealer.close)
        return dealer

    def on_close(self, closer: Callable[[], None]) -> None:
        """Have `closer` called at the end."""
        self._closers.append(closer)

    def close(self) -> None:
        """Peers first."""
        for closer in self._closers:
            closer()
        self.context.term()
        self.endpoint.close()


class Frontend:
    """An attached frontend's socket, read by hand."""

    def __init__(self, bench: Bench, limits: QueueLimits) -> None:
        self._bench = bench
        self.client = AttachClient(bench.context, bench.endpoint.address, SECRET, limits, DropCounters())
        self.received: list[FrontendBound] = []
        bench.on_close(self.client.close)

    def send(self, body: WorkerBound, epoch: int | None = None) -> None:
        """Send once connected."""
        used = self._bench.spec.epoch if epoch is None else epoch
        self._bench.poll_until(lambda: self.client.send(used, body))

    def messages(self) -> list[FrontendBound]:
        """All that has arrived so far."""
        self.received += self.client.receive(100)[0]
        return self.received


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An endpoint that admits frontends; a test sets other options by indirect parameters."""
    options = getattr(request, "param", EndpointOptions(limits=LIMITS))
    with launch_spec() as spec:
        made = Bench(spec, options)
        made.endpoint.describe(describe(spec, made.endpoint.address))
        yield made
        made.close()


def output(frontend_id: int) -> SequenceOutput:
    """Some output for a frontend's sequence."""
    return SequenceOutput(SequenceKey(frontend_id << 48 | 1), 0, b"\x01\x00\x00\x00")


# --- local queues ---


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


# --- attached frontends ---


def test_a_frontend_attaches_and_is_told_epoch_and_description(bench: Bench) -> None:
    """And speaks afterwards."""
    frontend = bench.frontend(7)
    assert frontend.messages() == [
        Attached(PROTOCOL_VERSION, bench.spec.epoch, describe(bench.spec, bench.endpoint.address))
    ]
    body = make_request(SequenceKey(7 << 48 | 1), [1])
    frontend.send(body)
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [Inbound(7, body)]


def test_two_frontends_get_their_own_results(bench: Bench) -> None:
    """Each batch goes to one; a broadcast to both."""
    one, two = bench.frontend(1), bench.frontend(2)
    for_one, for_two = (ResponseBatch(bench.spec.epoch, [output(number)]) for number in (1, 2))
    beat = Heartbeat(bench.spec.epoch, 0.0, WorkerLoad())
    assert bench.endpoint.send(1, for_one)
    assert bench.endpoint.send(2, for_two)
    bench.endpoint.broadcast(beat)
    bench.poll_until(lambda: len(one.messages()) == 3 and len(two.messages()) == 3)
    assert one.messages()[1:] == [for_one, beat]
    assert two.messages()[1:] == [for_two, beat]


def test_a_second_frontend_with_the_same_id_is_refused(bench: Bench) -> None:
    """And the first is not disturbed."""
    first, second = bench.frontend(7), bench.frontend(7)
    assert isinstance(second.messages()[0], AttachRefused)
    second.send(Abort(7 << 48))
    bench.poll_until(lambda: bench.endpoint.drops[DropReason.UNATTACHED] == 1)
    assert bench.endpoint.send(7, ResponseBatch(bench.spec.epoch, []))
    bench.poll_until(lambda: len(first.messages()) == 2)
    assert len(second.messages()) == 1


def test_a_frontend_is_refused_while_the_worker_loads() -> None:
    """It asks again later."""
    with launch_spec() as spec:
        bench = Bench(spec, EndpointOptions(limits=LIMITS))
        (answer,) = bench.frontend(7).messages()
        assert isinstance(answer, AttachRefused)
        assert "still loading" in answer.message
        bench.close()


@pytest.mark.parametrize(
    ("body", "epoch_shift", "reason"),
    [
        (Abort(8 << 48), 0, DropReason.FOREIGN_CLIENT_ID),
        (make_request(SequenceKey(5), [1]), 0, DropReason.FOREIGN_CLIENT_ID),
        (Abort(7 << 48), 1, DropReason.WRONG_EPOCH),
        (Drain(), 0, DropReason.FORBIDDEN),
        (Shutdown(1.0), 0, DropReason.FORBIDDEN),
    ],
)
def test_an_attached_frontends_message_out_of_place_is_dropped_and_counted(
    bench: Bench, body: WorkerBound, epoch_shift: int, reason: DropReason
) -> None:
    """Another's request, another epoch, or what only the owner may say. It stays attached."""
    frontend = bench.frontend(7)
    frontend.send(body, epoch=bench.spec.epoch + epoch_shift)
    bench.poll_until(lambda: bench.endpoint.drops[reason] == 1)
    assert bench.events == []
    assert bench.endpoint.send(7, ResponseBatch(bench.spec.epoch, []))


def test_messages_of_unattached_sockets_are_dropped_and_a_beat_is_answered(bench: Bench) -> None:
    """So that a frontend that was lost hears of it soon."""
    frontend = Frontend(bench, LIMITS)
    frontend.send(make_request(SequenceKey(7 << 48), [1]))
    frontend.send(FrontendBeat(7))
    bench.poll_until(lambda: bench.endpoint.drops[DropReason.UNATTACHED] == 2)
    bench.poll_until(lambda: bool(frontend.messages()))
    assert [type(message) for message in frontend.messages()] == [AttachRefused]
    assert bench.events == []


def test_garbage_from_a_socket_with_the_key_is_dropped_and_counted(bench: Bench) -> None:
    """Random frames of random shapes: none gets through, and the port still serves afterwards."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    dealer = bench.raw_dealer()
    sent = 200
    for _ in range(sent):
        frames = [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 4))]
        dealer.send_multipart(frames)
    bench.poll_until(lambda: bench.endpoint.drops.total == sent)
    assert bench.endpoint.drops[DropReason.MALFORMED] == sent
    assert bench.events == []
    bench.frontend(7)


def test_garbage_from_plain_tcp_connections_does_not_reach_the_worker(bench: Bench) -> None:
    """No ZMTP at all; the port still serves afterwards."""
    import socket  # noqa: PLC0415 - the system's sockets, in this test alone

    host, port = bench.endpoint.address.removeprefix("tcp://").split(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 64):
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(junk)
    bench.frontend(7)
    assert bench.events == []
    assert bench.endpoint.drops.total == 0


def test_a_message_over_the_limit_ends_its_connection_only(bench: Bench) -> None:
    """ZMQ closes it before a byte of the message is kept."""
    frontend = bench.frontend(7)
    dealer = bench.raw_dealer()
    dealer.setsockopt(zmq.SNDTIMEO, 5000)
    dealer.send(bytes(MAX_MESSAGE_BYTES + 1))
    frontend.send(Abort(7 << 48))
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [Inbound(7, Abort(7 << 48))]
    assert bench.endpoint.drops.total == 0


def test_a_frontend_that_detaches_is_lost_at_once(bench: Bench) -> None:
    """Its id is free again."""
    bench.frontend(7).send(Detach(7))
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [FrontendLost(7)]
    assert not bench.endpoint.send(7, ResponseBatch(bench.spec.epoch, []))
    bench.frontend(7)


@pytest.mark.parametrize("bench", [EndpointOptions(limits=LIMITS, silent_after_s=0.3)], indirect=True)
def test_a_frontend_that_beats_stays_and_a_silent_one_is_lost(bench: Bench) -> None:
    """Two frontends, one beats."""
    beating, _silent = bench.frontend(1), bench.frontend(2)

    def lost() -> bool:
        beating.client.send(bench.spec.epoch, FrontendBeat(1))
        return bool(bench.events)

    bench.poll_until(lost)
    assert bench.events == [FrontendLost(2)]


@pytest.mark.parametrize("bench", [EndpointOptions(limits=LIMITS, silent_after_s=0.3)], indirect=True)
def test_a_pause_of_the_worker_is_no_silence_of_its_frontends(bench: Bench) -> None:
    """Beats that arrived while the worker did not look are read before anyone is declared silent."""
    frontend = bench.frontend(7)
    time.sleep(0.4)
    frontend.client.send(bench.spec.epoch, FrontendBeat(7))
    time.sleep(0.05)
    assert bench.endpoint.poll(0) == []
    assert bench.endpoint.send(7, ResponseBatch(bench.spec.epoch, []))


def test_a_frontend_that_reads_nothing_is_lost_and_the_worker_never_blocks(bench: Bench) -> None:
    """Its queue fills up to the high-water mark; the other frontend gets everything."""
    stuck, fine = bench.frontend(1, QueueLimits(messages=1)), bench.frontend(2)
    large = ResponseBatch(bench.spec.epoch, [output(1)] * 10_000)
    sent = 0
    while bench.endpoint.send(1, large):
        sent += 1
        assert sent < 10_000
    assert not bench.endpoint.send(1, large)
    bench.poll_until(lambda: bool(bench.events))
    assert bench.events == [FrontendLost(1)]
    assert bench.endpoint.send(2, ResponseBatch(bench.spec.epoch, []))
    bench.poll_until(lambda: len(fine.messages()) == 2)
    assert sent >= LIMITS.messages // 2
    assert stuck.client.failure() is None


def test_a_frontend_whose_connection_is_gone_is_lost_with_the_next_message(bench: Bench) -> None:
    """ROUTER_MANDATORY tells."""
    frontend = bench.frontend(7)
    frontend.client.close()
    bench._closers.clear()
    beat = Heartbeat(bench.spec.epoch, 0.0, WorkerLoad())

    def lost() -> bool:
        bench.endpoint.broadcast(beat)
        return bool(bench.events)

    bench.poll_until(lost)
    assert bench.events == [FrontendLost(7)]


def test_a_wake_ends_a_poll_early_and_is_harmless_after_the_end() -> None:
    """From any thread, at any time."""
    with launch_spec(secret=None) as spec:
        endpoint = WorkerEndpoint(spec)
        endpoint.wake()
        assert endpoint.poll(60) == []
        endpoint.close()
        endpoint.wake()


def test_an_address_that_is_taken_is_a_configuration_error(bench: Bench) -> None:
    """With the address; nothing is left open."""
    with launch_spec(bind=bench.endpoint.address) as spec, pytest.raises(ConfigError, match=bench.endpoint.address):
        WorkerEndpoint(spec)
