"""Counts of messages that a receiver threw away, by reason. A dropped message is never an exception."""

import enum
from collections import Counter

import structlog

log = structlog.get_logger(__name__)


class DropReason(enum.StrEnum):
    """Why a message was dropped."""

    BAD_MAC = "bad_mac"
    REPLAYED = "replayed"
    MALFORMED = "malformed"
    WRONG_EPOCH = "wrong_epoch"
    UNATTACHED = "unattached"
    FOREIGN_CLIENT_ID = "foreign_client_id"
    FORBIDDEN = "forbidden"
    UNKNOWN_KEY = "unknown_key"


class DropCounters:
    """How many messages one receiver dropped. Written by the receiver's thread, read from any."""

    def __init__(self) -> None:
        self._counts: Counter[DropReason] = Counter()

    def count(self, reason: DropReason, messages: int = 1) -> None:
        """Note that `messages` were dropped for `reason`.

        It is logged whenever a count passes a power of two, so that a flood of messages is no flood of logs.
        """
        before = self._counts[reason]
        self._counts[reason] = after = before + messages
        if after.bit_length() > before.bit_length():
            log.warning("dropped messages", reason=reason.value, dropped=after)

    def __getitem__(self, reason: DropReason) -> int:
        return self._counts[reason]

    @property
    def total(self) -> int:
        """All drops."""
        return self._counts.total()
