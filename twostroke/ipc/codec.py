"""Messages as msgpack bytes and back. Typed: whatever does not decode to a known struct is a `ProtocolError`."""

from typing import Generic, TypeVar

import msgspec

from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.requests import RequestEnvelope
from twostroke.protocol.responses import FrontendBound
from twostroke.protocol.worker import InitAck, InitStatus

MAX_MESSAGE_BYTES = 64 << 20
"""A larger message is refused: by the sender with an error, by the receiver's ZMQ by closing the connection."""

MAX_BUNDLE = 256
"""Messages to a worker that may travel as the frames of one ZMQ message: each ZMQ message wakes threads twice."""

Message = TypeVar("Message")


class Codec(Generic[Message]):
    """Encodes and decodes the messages of one queue.

    Args:
        decoder: Knows the queue's type of message.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder

    def encode(self, message: Message) -> bytes:
        """`message` as msgpack.

        Raises:
            ProtocolError: It is larger than any receiver takes.
        """
        payload = self._encoder.encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        return payload

    def decode(self, payload: bytes) -> Message:
        """The message in `payload`.

        Raises:
            ProtocolError: It is no message of this queue.
        """
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this queue: {error}") from None


def request_codec() -> Codec[RequestEnvelope]:
    """For the request queue."""
    return Codec(msgspec.msgpack.Decoder(RequestEnvelope))


def result_codec() -> Codec[FrontendBound]:
    """For the result queue."""
    return Codec(msgspec.msgpack.Decoder(FrontendBound))


def init_status_codec() -> Codec[InitStatus]:
    """For the worker init status queue, towards the launcher."""
    return Codec(msgspec.msgpack.Decoder(InitStatus))


def init_ack_codec() -> Codec[InitAck]:
    """For the worker init status queue, towards the worker."""
    return Codec(msgspec.msgpack.Decoder(InitAck))
