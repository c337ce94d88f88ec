"""The sealed envelope of local queues: every message is authenticated before anything decodes it.

    frame 0: counter (8 bytes, little endian) | HMAC-SHA256 (32 bytes)
    frame 1: payload
    MAC over: session (epoch, 8 bytes | nonce, 16 bytes) | direction (1 byte) | counter | payload

The key is drawn anew for every launch and reaches the worker through an inherited pipe. The session binds a message to
one launch, the direction keeps a queue's messages from being reflected into another, and the counter, which must rise,
stops replays and reordering.
"""

import enum
import hmac
from dataclasses import dataclass

from twostroke.ipc.drops import DropReason

KEY_BYTES = 32
NONCE_BYTES = 16

_COUNTER_BYTES = 8
_MAC_BYTES = 32
_HEADER_BYTES = _COUNTER_BYTES + _MAC_BYTES
_SEALED_FRAMES = 2


class Direction(enum.IntEnum):
    """Which local queue a message travels on, and which way."""

    REQUEST = 1
    RESULT = 2
    INIT_STATUS = 3
    INIT_ACK = 4


@dataclass(frozen=True, slots=True, repr=False)
class Session:
    """What all sealed messages of one launch share; never logged.

    Attributes:
        epoch: The worker world's epoch.
        nonce: 16 random bytes, drawn at launch.
        key: 32 random bytes, drawn at launch.
    """

    epoch: int
    nonce: bytes
    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.nonce) != NONCE_BYTES:
            raise ValueError(
                f"a session needs a key of {KEY_BYTES} and a nonce of {NONCE_BYTES} bytes, "
                f"not {len(self.key)} and {len(self.nonce)}"
            )

    def prefix(self, direction: Direction) -> bytes:
        """What precedes the counter under the MAC."""
        return self.epoch.to_bytes(8, "little") + self.nonce + bytes((direction,))


class Sealer:
    """Seals the messages of one direction; used by the one thread that sends them."""

    def __init__(self, session: Session, direction: Direction) -> None:
        self._key = session.key
        self._prefix = session.prefix(direction)
        self._counter = 0

    def seal(self, payload: bytes) -> list[bytes]:
        """The frames of the next message."""
        self._counter += 1
        counter = self._counter.to_bytes(_COUNTER_BYTES, "little")
        return [counter + hmac.digest(self._key, self._prefix + counter + payload, "sha256"), payload]


class SealError(Exception):
    """A message did not pass; `reason` says why."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Unsealer:
    """Checks the messages of one direction; used by the one thread that receives them."""

    def __init__(self, session: Session, direction: Direction) -> None:
        self._key = session.key
        self._prefix = session.prefix(direction)
        self._last = 0

    def unseal(self, frames: list[bytes]) -> bytes:
        """The payload of an authentic, new message.

        Raises:
            SealError: The frames are malformed, the MAC is wrong, or the counter did not rise.
        """
        if len(frames) != _SEALED_FRAMES or len(frames[0]) != _HEADER_BYTES:
            raise SealError(DropReason.MALFORMED)
        header, payload = frames
        counter, mac = header[:_COUNTER_BYTES], header[_COUNTER_BYTES:]
        expected = hmac.digest(self._key, self._prefix + counter + payload, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise SealError(DropReason.BAD_MAC)
        number = int.from_bytes(counter, "little")
        if number <= self._last:
            raise SealError(DropReason.REPLAYED)
        self._last = number
        return payload
