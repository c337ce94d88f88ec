"""Which frontends are attached to a worker over TCP, and what each may say. Pure: no socket, no clock.

    unknown --Attach: version and id fit--> attached --message--> attached (heard)
    unknown --Attach: they do not-->        unknown  (refused, with the reason)
    attached --Detach | silent | cannot take a message--> unknown (lost: its requests are aborted)

An attached frontend is the pair of its socket's identity and its frontend id: a message of another identity never acts
in its name, and a frontend id is held by one identity at a time.
"""

from dataclasses import dataclass

from twostroke.ipc.drops import DropReason
from twostroke.protocol.ids import LAUNCHING_FRONTEND, MAX_FRONTEND_ID, frontend_of
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Drain,
    GenerationRequest,
    Shutdown,
    WorkerBound,
)

Served = GenerationRequest | Abort | Drain | Shutdown
"""What a worker acts on; attach, beats and detach are dealt with before."""


@dataclass(slots=True)
class _Attachment:
    identity: bytes
    frontend_id: int
    heard_at: float


class Attachments:
    """The attached frontends of one worker.

    Args:
        silent_after_s: A frontend that was not heard for so long is lost.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._by_identity: dict[bytes, _Attachment] = {}
        self._by_frontend: dict[int, _Attachment] = {}

    def attach(self, identity: bytes, attach: Attach, now: float) -> str | None:
        """Take a frontend on; returns None, or why not. The same frontend may ask again."""
        if attach.version != PROTOCOL_VERSION:
            return f"the frontend speaks version {attach.version}, this worker version {PROTOCOL_VERSION}"
        if not LAUNCHING_FRONTEND < attach.frontend_id <= MAX_FRONTEND_ID:
            return f"frontend id {attach.frontend_id} is outside 1..{MAX_FRONTEND_ID}"
        holder = self._by_frontend.get(attach.frontend_id)
        if holder is not None and holder.identity != identity:
            return f"frontend id {attach.frontend_id} is held by another live frontend; restart this one to draw anew"
        known = self._by_identity.get(identity)
        if known is not None and known.frontend_id != attach.frontend_id:
            return f"this socket is attached as frontend {known.frontend_id}; use a fresh one"
        attachment = _Attachment(identity, attach.frontend_id, now)
        self._by_identity[identity] = self._by_frontend[attach.frontend_id] = attachment
        return None

    def heard(self, identity: bytes, now: float) -> int | None:
        """The frontend behind `identity`, which lives; None if it is not attached."""
        attachment = self._by_identity.get(identity)
        if attachment is None:
            return None
        attachment.heard_at = now
        return attachment.frontend_id

    def identity_of(self, frontend_id: int) -> bytes | None:
        """The socket identity of an attached frontend; None if it is not attached."""
        attachment = self._by_frontend.get(frontend_id)
        return None if attachment is None else attachment.identity

    def forget(self, frontend_id: int) -> bool:
        """Drop a frontend; False if it was not attached."""
        attachment = self._by_frontend.pop(frontend_id, None)
        if attachment is None:
            return False
        del self._by_identity[attachment.identity]
        return True

    def silent(self, now: float) -> list[int]:
        """The frontends that were not heard for too long."""
        limit = now - self._silent_after_s
        return [entry.frontend_id for entry in self._by_frontend.values() if entry.heard_at < limit]

    def excuse(self, pause_s: float, now: float) -> None:
        """Nobody was listened to for `pause_s` until `now`, which counts as nobody's silence."""
        if not pause_s:
            return
        for entry in self._by_frontend.values():
            entry.heard_at = min(now, entry.heard_at + pause_s)

    def frontends(self) -> list[int]:
        """All attached frontends."""
        return list(self._by_frontend)


def why_not(frontend_id: int, body: WorkerBound) -> DropReason | None:
    """Whether `frontend_id` may send `body` to a worker: None, or why not.

    A frontend speaks of its own requests only, and the launching one alone owns the worker.
    """
    if isinstance(body, GenerationRequest):
        return None if frontend_of(body.key.client_id) == frontend_id else DropReason.FOREIGN_CLIENT_ID
    if isinstance(body, Abort):
        return None if frontend_of(body.client_id) == frontend_id else DropReason.FOREIGN_CLIENT_ID
    if isinstance(body, Drain | Shutdown):
        return None if frontend_id == LAUNCHING_FRONTEND else DropReason.FORBIDDEN
    return DropReason.FORBIDDEN if frontend_id == LAUNCHING_FRONTEND else None
