"""A worker's endpoint and its attached frontends: who gets through, what is dropped and counted, who is lost."""

import random
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.support.endpoint_bench import LIMITS, Bench, Frontend, endpoint_bench, output
from tests.support.processes import wait_until
from tests.support.scripted_worker import describe, make_request
from tests.support.worker_thread import launch_spec
from twostroke.ipc.codec import MAX_BUNDLE, MAX_MESSAGE_BYTES
from twostroke.ipc.drops import DropReason
from twostroke.ipc.endpoint import EndpointOptions, FrontendLost, Inbound, WorkerEndpoint
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Detach,
    Drain,
    FrontendBeat,
    Shutdown,
    WorkerBound,
)
from twostroke.protocol.responses import ResponseBatch
from twostroke.protocol.worker import Attached, AttachRefused, Heartbeat, WorkerLoad


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An endpoint that admits frontends; a test sets other options by indirect parameters."""
    with endpoint_bench(getattr(request, "param", None)) as made:
        yield made


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


def test_a_bundle_is_taken_in_order_and_up_to_what_is_no_message(bench: Bench) -> None:
    """Each frame is a message of its own; one that is none is counted, and nothing after it counts."""
    frontend = bench.frontend(7)
    aborts = [Abort((7 << 48) + number) for number in range(4)]
    payloads = [frontend.client.encode(bench.spec.epoch, abort) for abort in aborts]
    assert frontend.client.send_bundle([*payloads[:3], b"garbage", payloads[3]])
    bench.poll_until(lambda: bool(bench.endpoint.drops.total))
    assert bench.events == [Inbound(7, abort) for abort in aborts[:3]]
    assert bench.endpoint.drops[DropReason.MALFORMED] == 1


def test_a_bundle_beyond_the_bound_is_no_message(bench: Bench) -> None:
    """However right its frames are: the bound keeps one frontend from holding the worker up."""
    frontend = bench.frontend(7)
    payload = frontend.client.encode(bench.spec.epoch, Abort(7 << 48))
    assert frontend.client.send_bundle([payload] * (MAX_BUNDLE + 1))
    bench.poll_until(lambda: bool(bench.endpoint.drops.total))
    assert frontend.client.send_bundle([payload] * MAX_BUNDLE)
    bench.poll_until(lambda: len(bench.events) == MAX_BUNDLE)
    assert bench.endpoint.drops.total == 1


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
    """Whether their beats arrived while the worker did not look, or come only now, since their host paused too."""
    frontend = bench.frontend(7)
    time.sleep(0.4)
    assert [bench.endpoint.poll(0) for _ in range(3)] == [[]] * 3
    frontend.client.send(bench.spec.epoch, FrontendBeat(7))
    assert bench.endpoint.poll(0.05) == []
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


def test_what_arrived_before_the_connection_was_lost_is_read() -> None:
    """A worker that ends in order says everything first; its frontend may be slower than its end."""
    with launch_spec() as spec:
        bench = Bench(spec, EndpointOptions(limits=LIMITS))
        bench.endpoint.describe(describe(spec, bench.endpoint.address))
        frontend = bench.frontend(7)
        batches = [ResponseBatch(spec.epoch, [output(7)]) for _ in range(20)]
        for batch in batches:
            assert bench.endpoint.send(7, batch)
        bench.endpoint.close(5.0)
        wait_until(lambda: frontend.client.failure() is not None, 10.0, "the loss of the connection")
        assert frontend.messages()[1:] == batches
        frontend.client.close()
        bench.context.term()


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
