"""The worker's TCP port: one CURVE ROUTER where frontends attach, send requests and get results.

After the identity frame of a message come 1 to `MAX_BUNDLE` frames in, each a `RequestEnvelope`, and one out, a
`FrontendBound`. The rules of who may say what are in `attachments`; this module moves frames. It never blocks: a
frontend that cannot take a message is lost.
"""

from collections import deque
from dataclasses import dataclass

import structlog
import zmq

from twostroke.ipc.attachments import Attachments, Served, why_not
from twostroke.ipc.codec import MAX_BUNDLE, request_codec, result_codec
from twostroke.ipc.curve import secure_server
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.sockets import (
    Context,
    QueueLimits,
    advertised_address,
    open_socket,
    try_receive,
    try_send,
)
from twostroke.protocol.errors import ConfigError, ProtocolError
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Detach,
    Drain,
    FrontendBeat,
    GenerationRequest,
    RequestEnvelope,
    Shutdown,
    WorkerBound,
)
from twostroke.protocol.responses import FrontendBound
from twostroke.protocol.worker import Attached, AttachRefused, WorkerDescription

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message for the worker, authenticated and permitted.

    Attributes:
        frontend_id: Who sent it; `LAUNCHING_FRONTEND` for the local queue.
        body: What it says.
    """

    frontend_id: int
    body: Served


@dataclass(frozen=True, slots=True)
class FrontendLost:
    """A frontend left, fell silent, or could not take a message: its requests are to be aborted."""

    frontend_id: int


Event = Inbound | FrontendLost


class AttachPort:
    """One ROUTER with the frontends attached to it.

    Args:
        context: The worker's ZMQ context, which has a `CurveGuard`.
        secret: The cluster secret.
        bind: ZMQ address; port 0 takes a free one.
        advertise: Host that peers reach it by; None: see `advertised_address`.
        epoch: The worker's epoch.
        limits: Of each frontend's queues.
        silent_after_s: A frontend not heard for so long is lost.
        drops: Counts what is dropped.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        *,
        secret: bytes,
        bind: str,
        advertise: str | None,
        epoch: int,
        limits: QueueLimits,
        silent_after_s: float,
        drops: DropCounters,
    ) -> None:
        self._epoch = epoch
        self._drops = drops
        self._attachments = Attachments(silent_after_s)
        self._description: WorkerDescription | None = None
        self._codec, self._result_codec = request_codec(), result_codec()
        self._lost: deque[FrontendLost] = deque()
        self.socket = open_socket(context, zmq.ROUTER, limits)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secure_server(self.socket, secret)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"worker_bind: cannot bind {bind}: {error}") from None
        self.address = advertised_address(self.socket.getsockopt_string(zmq.LAST_ENDPOINT), advertise)

    def describe(self, description: WorkerDescription) -> None:
        """Admit frontends from now on, and tell them `description`."""
        self._description = description

    def receive(self, limit: int, now: float) -> tuple[list[Event], bool]:
        """What has arrived, in order, at most `limit` bundles; the flag says whether nothing was left waiting."""
        events: list[Event] = []
        for _ in range(limit):
            frames = try_receive(self.socket)
            if frames is None:
                return events, True
            identity, *payloads = frames
            if not 1 <= len(payloads) <= MAX_BUNDLE:
                self._drops.count(DropReason.MALFORMED)
                continue
            for payload in payloads:
                try:
                    envelope = self._codec.decode(payload)
                except ProtocolError:
                    self._drops.count(DropReason.MALFORMED)
                    break  # whoever bundled this is not to be trusted with the rest
                event = self._handle(identity, envelope, now)
                if event is not None:
                    events.append(event)
        return events, False

    def _handle(self, identity: bytes, envelope: RequestEnvelope, now: float) -> Event | None:
        body = envelope.body
        if isinstance(body, Attach):
            self._attach(identity, body, now)
            return None
        frontend_id = self._attachments.heard(identity, now)
        if frontend_id is None:
            self._drops.count(DropReason.UNATTACHED)
            if isinstance(body, FrontendBeat):
                self._refuse(identity, "this frontend is not attached (any more); attach on a fresh socket")
            return None
        if envelope.epoch != self._epoch:
            self._drops.count(DropReason.WRONG_EPOCH)
            return None
        return self._permit(frontend_id, body)

    def _permit(self, frontend_id: int, body: WorkerBound) -> Event | None:
        reason = why_not(frontend_id, body)
        if reason is not None:
            self._drops.count(reason)
        elif isinstance(body, Detach):
            self._attachments.forget(frontend_id)
            return FrontendLost(frontend_id)
        elif isinstance(body, GenerationRequest | Abort | Drain | Shutdown):
            return Inbound(frontend_id, body)
        return None  # dropped, or a beat: being heard was all

    def _attach(self, identity: bytes, attach: Attach, now: float) -> None:
        if self._description is None:
            self._refuse(identity, "the worker is still loading; try again")
            return
        refusal = self._attachments.attach(identity, attach, now)
        if refusal is not None:
            self._refuse(identity, refusal)
            return
        log.info("frontend attached", frontend_id=attach.frontend_id)
        answer = Attached(PROTOCOL_VERSION, self._epoch, self._description)
        if not try_send(self.socket, [identity, self._result_codec.encode(answer)]):
            self.lose(attach.frontend_id, "it went away while attaching")

    def _refuse(self, identity: bytes, message: str) -> None:
        log.warning("refused a frontend", reason=message)
        answer: FrontendBound = AttachRefused(PROTOCOL_VERSION, self._epoch, message)
        try_send(self.socket, [identity, self._result_codec.encode(answer)])

    def send(self, frontend_id: int, payload: bytes) -> bool:
        """Queue an encoded message; False if that frontend is not attached or cannot take it, and then it is lost."""
        identity = self._attachments.identity_of(frontend_id)
        if identity is None:
            return False
        if try_send(self.socket, [identity, payload]):
            return True
        self.lose(frontend_id, "it does not read its messages or is gone")
        return False

    def broadcast(self, payload: bytes) -> None:
        """Queue an encoded message for every attached frontend."""
        for frontend_id in self._attachments.frontends():
            self.send(frontend_id, payload)

    def lose(self, frontend_id: int, why: str) -> None:
        """Forget a frontend; `take_lost` tells the worker."""
        if self._attachments.forget(frontend_id):
            log.warning("frontend lost", frontend_id=frontend_id, reason=why)
            self._lost.append(FrontendLost(frontend_id))

    def excuse(self, pause_s: float, now: float) -> None:
        """The worker itself paused: see `Attachments.excuse`."""
        self._attachments.excuse(pause_s, now)

    def lose_silent(self, now: float) -> None:
        """Forget the frontends that fell silent."""
        for frontend_id in self._attachments.silent(now):
            self.lose(frontend_id, "it fell silent")

    def take_lost(self) -> list[Event]:
        """The frontends lost since the last call."""
        lost: list[Event] = list(self._lost)
        self._lost.clear()
        return lost

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages may still be taken for `linger_ms`."""
        self.socket.close(linger=linger_ms)
