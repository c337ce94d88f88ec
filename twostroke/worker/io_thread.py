"""The I/O thread: it alone uses the sockets of the executor boundary, and it gives the worker's sign of life.

    engine thread --respond--> outbox --> endpoint          results, one message a step and frontend
    endpoint --> inbox --> engine thread                    requests, aborts, lost frontends, control
    endpoint <-- heartbeat, every 250 ms once ready         even while a step runs or hangs
    start-up: `report` and `serve`; end: `stop`, with a last message to all frontends

It never waits for a frontend or for the engine thread: what does not fit the inbox is refused at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import structlog

from twostroke.ipc.endpoint import FrontendLost, Inbound, WorkerEndpoint
from twostroke.protocol.errors import OverloadedError
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import ResponseBatch, SequenceOutput
from twostroke.protocol.tokens import token_count
from twostroke.protocol.worker import Heartbeat, InitStatus, WorkerDescription, WorkerStopping
from twostroke.worker.inbox import FrontendGone, Inbox, PartCrashed, Received
from twostroke.worker.outbox import Outbox
from twostroke.worker.pulse import Pulse

HEARTBEAT_S = 0.25
OUTBOX_CAPACITY = 4096
LAST_MESSAGE_LINGER_S = 0.5
"""How long the sockets may take to send what was queued before they close."""


class IoThread:
    """Runs one endpoint. All methods may be called from any thread.

    Args:
        endpoint: The worker's sockets; this object owns them from now on.
        epoch: The worker's epoch.
        inbox: Of the engine thread.
        pulse: Of the engine thread.
    """

    def __init__(self, endpoint: WorkerEndpoint, epoch: int, inbox: Inbox, pulse: Pulse) -> None:
        self._endpoint = endpoint
        self._epoch = epoch
        self._inbox = inbox
        self._pulse = pulse
        self._outbox = Outbox(OUTBOX_CAPACITY, endpoint.wake)
        self._calls: deque[Callable[[], None]] = deque()
        self._gone: deque[FrontendGone] = deque()
        self._next_beat = float("inf")  # no heartbeat before the worker is ready
        self._stopping = False
        self._log = structlog.get_logger(__name__).bind(epoch=epoch)
        self._thread = threading.Thread(target=self._run, name="worker-io", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def report(self, status: InitStatus) -> Future[None]:
        """Tell the launcher how the start goes; the future waits for its answer, or fails with `ProtocolError`."""
        reported: Future[None] = Future()

        def send() -> None:
            try:
                self._endpoint.report(status)
            except Exception as error:  # noqa: BLE001 - whoever waits for the report decides what it means
                reported.set_exception(error)
            else:
                reported.set_result(None)

        self._call(send)
        return reported

    def serve(self, description: WorkerDescription) -> None:
        """Admit frontends over TCP, and begin with heartbeats."""

        def begin() -> None:
            self._endpoint.describe(description)
            self._next_beat = time.monotonic()

        self._call(begin)

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """Queue a step's outputs for one frontend; see `Outbox.respond`."""
        self._outbox.respond(frontend_id, batch)

    def stop(self, reason: str, deadline_s: float) -> bool:
        """Send what is queued, tell every frontend that the worker stops, and close the sockets.

        Returns:
            Whether that was done within `deadline_s`.
        """

        def end() -> None:
            self._flush()
            self._endpoint.broadcast(WorkerStopping(self._epoch, reason))
            self._stopping = True

        self._call(end)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _call(self, function: Callable[[], None]) -> None:
        """Run `function` on the I/O thread."""
        if self._thread.is_alive():
            self._calls.append(function)
            self._endpoint.wake()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._go_round()
        except Exception as error:  # noqa: BLE001 - handed to the engine thread, which ends the worker
            self._log.exception("the I/O thread crashed")
            self._inbox.stop(PartCrashed("I/O thread", error))
        finally:
            self._endpoint.close(LAST_MESSAGE_LINGER_S)

    def _go_round(self) -> None:
        for event in self._endpoint.poll(self._until_beat_s()):
            self._take(event)
        self._pass_on_gone()
        while self._calls:
            self._calls.popleft()()
        self._flush()
        self._beat_if_due()

    # --- inbound ---

    def _take(self, event: Inbound | FrontendLost) -> None:
        if isinstance(event, FrontendLost):
            self._gone.append(FrontendGone(event.frontend_id))
        elif isinstance(event.body, GenerationRequest):
            if not self._inbox.offer_request(Received(event.frontend_id, event.body)):
                self._refuse(event.frontend_id, event.body)
        elif not self._inbox.offer_control(Received(event.frontend_id, event.body)):
            self._log.error("the engine thread is stuck; dropped a message", message_type=type(event.body).__name__)

    def _pass_on_gone(self) -> None:
        """A lost frontend is never forgotten, however full the inbox is."""
        while self._gone and self._inbox.offer_control(self._gone[0]):
            self._gone.popleft()

    def _refuse(self, frontend_id: int, request: GenerationRequest) -> None:
        error = OverloadedError("this worker does not keep up with its requests; try again later").to_info()
        refusal = SequenceOutput(request.key, token_count(request.generated_ids), error=error)
        self._endpoint.send(frontend_id, ResponseBatch(self._epoch, [refusal]))

    # --- outbound ---

    def _flush(self) -> None:
        for outgoing in self._outbox.take():
            # If the frontend cannot take it, the next poll says that it is lost.
            self._endpoint.send(outgoing.frontend_id, outgoing.batch)

    def _until_beat_s(self) -> float:
        if self._gone:
            return HEARTBEAT_S / 10  # the inbox was full; look again soon
        return min(max(0.0, self._next_beat - time.monotonic()), 1.0)

    def _beat_if_due(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + HEARTBEAT_S
        load = self._pulse.load
        counters = msgspec.structs.replace(load.counters, dropped_messages=self._endpoint.drops.total)
        load = msgspec.structs.replace(load, counters=counters)
        self._endpoint.broadcast(Heartbeat(self._epoch, self._pulse.age_s, load))
