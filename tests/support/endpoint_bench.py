"""A worker's endpoint with peers at real sockets, all driven by the test's own thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from tests.support.scripted_worker import describe
from tests.support.worker_thread import SECRET, launch_spec
from twostroke.ipc.attach_client import AttachClient
from twostroke.ipc.curve import secure_client
from twostroke.ipc.drops import DropCounters
from twostroke.ipc.endpoint import EndpointOptions, Event, WorkerEndpoint
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Attach,
    WorkerBound,
)
from twostroke.protocol.responses import FrontendBound, SequenceOutput

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


@contextmanager
def endpoint_bench(options: EndpointOptions | None = None) -> Iterator[Bench]:
    """An endpoint that admits frontends."""
    with launch_spec() as spec:
        bench = Bench(spec, options or EndpointOptions(limits=LIMITS))
        bench.endpoint.describe(describe(spec, bench.endpoint.address))
        yield bench
        bench.close()


def output(frontend_id: int) -> SequenceOutput:
    """Some output for a frontend's sequence."""
    return SequenceOutput(SequenceKey(frontend_id << 48 | 1), 0, b"\x01\x00\x00\x00")
