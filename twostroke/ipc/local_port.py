"""The worker's end of the three local queues: request and result queue, and the init status queue.

All are `ipc://` sockets in a directory that only the launching user can enter, bound by the worker and sealed (`seal`).
"""

import time

import zmq

from twostroke.ipc.attachments import Served, why_not
from twostroke.ipc.codec import init_ack_codec, init_status_codec, request_codec
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.seal import Direction, Sealer, SealError, Unsealer
from twostroke.ipc.sockets import Context, QueueLimits, open_socket, try_receive, try_send
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import LAUNCHING_FRONTEND
from twostroke.protocol.requests import Abort, Drain, GenerationRequest, Shutdown
from twostroke.protocol.worker import InitStatus


class LocalPort:
    """Receives what the launching frontend sends and sends results to it; never blocks."""

    def __init__(self, context: Context, spec: LaunchSpec, limits: QueueLimits, drops: DropCounters) -> None:
        self._epoch = spec.epoch
        self._drops = drops
        self._codec = request_codec()
        self._unsealer = Unsealer(spec.session, Direction.REQUEST)
        self._sealer = Sealer(spec.session, Direction.RESULT)
        self.requests = open_socket(context, zmq.PULL, limits)
        self._results = open_socket(context, zmq.PUSH, limits)
        self.requests.bind(spec.request_address)
        self._results.bind(spec.result_address)

    def receive(self, limit: int) -> list[Served]:
        """What has arrived, in order, at most `limit` messages; what may not be is dropped and counted."""
        bodies: list[Served] = []
        for _ in range(limit):
            frames = try_receive(self.requests)
            if frames is None:
                break
            try:
                bodies.append(self._open(frames))
            except SealError as error:
                self._drops.count(error.reason)
        return bodies

    def _open(self, frames: list[bytes]) -> Served:
        payload = self._unsealer.unseal(frames)
        try:
            envelope = self._codec.decode(payload)
        except ProtocolError:
            raise SealError(DropReason.MALFORMED) from None
        if envelope.epoch != self._epoch:
            raise SealError(DropReason.WRONG_EPOCH)
        body = envelope.body
        reason = why_not(LAUNCHING_FRONTEND, body)
        if reason is not None or not isinstance(body, GenerationRequest | Abort | Drain | Shutdown):
            raise SealError(reason or DropReason.FORBIDDEN)
        return body

    def await_reader(self, timeout_s: float) -> bool:
        """Wait until the launching frontend is connected to the result queue; False if it is not in time."""
        return bool(self._results.poll(int(timeout_s * 1000), zmq.POLLOUT))

    def send(self, payload: bytes) -> bool:
        """Queue an encoded message for the launching frontend; False if it does not read."""
        return try_send(self._results, self._sealer.seal(payload))

    def close(self, linger_ms: int) -> None:
        """Close both sockets; queued results may still be taken for `linger_ms`."""
        self.requests.close()
        self._results.close(linger=linger_ms)


class InitStatusPort:
    """Reports to the launcher how the start goes; each message waits for its acknowledgement."""

    def __init__(self, context: Context, spec: LaunchSpec, limits: QueueLimits) -> None:
        self._spec = spec
        self._codec, self._ack_codec = init_status_codec(), init_ack_codec()
        self._sealer = Sealer(spec.session, Direction.INIT_STATUS)
        self._unsealer = Unsealer(spec.session, Direction.INIT_ACK)
        self._socket = open_socket(context, zmq.REQ, limits)
        self._socket.bind(spec.init_address)

    def report(self, status: InitStatus, deadline_s: float) -> None:
        """Send `status` and wait until the launcher has it.

        Raises:
            ProtocolError: The launcher did not acknowledge in time, or not with the key of this launch.
        """
        ends_at = time.monotonic() + deadline_s
        frames = self._sealer.seal(self._codec.encode(status))
        if not (
            self._wait(zmq.POLLOUT, ends_at) and try_send(self._socket, frames) and self._wait(zmq.POLLIN, ends_at)
        ):
            raise ProtocolError(
                f"the launcher did not acknowledge {type(status).__name__} within {deadline_s} s; is it alive?"
            )
        try:
            ack = self._ack_codec.decode(self._unsealer.unseal(self._socket.recv_multipart()))
        except SealError as error:
            raise ProtocolError(f"the launcher's acknowledgement was refused: {error}") from None
        if ack.epoch != self._spec.epoch:
            raise ProtocolError(f"the launcher acknowledged epoch {ack.epoch}, not {self._spec.epoch}")

    def _wait(self, event: int, ends_at: float) -> bool:
        remaining_ms = max(0.0, ends_at - time.monotonic()) * 1000
        return bool(self._socket.poll(int(remaining_ms), event))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
