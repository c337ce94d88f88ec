"""Who is attached to a worker, and what each frontend may say."""

import pytest

from twostroke.ipc.attachments import Attachments, why_not
from twostroke.ipc.drops import DropReason
from twostroke.protocol.ids import LAUNCHING_FRONTEND, ClientIds, SequenceKey
from twostroke.protocol.requests import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Detach,
    Drain,
    FrontendBeat,
    GenerationRequest,
    Shutdown,
    WorkerBound,
)
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens

ALICE, BOB = b"identity-a", b"identity-b"


def attach(frontend_id: int, version: int = PROTOCOL_VERSION) -> Attach:
    """An attach message."""
    return Attach(version, frontend_id)


def test_a_frontend_attaches_is_heard_and_leaves() -> None:
    """The whole life."""
    attachments = Attachments(silent_after_s=5)
    assert attachments.heard(ALICE, 0.0) is None
    assert attachments.attach(ALICE, attach(7), 0.0) is None
    assert attachments.heard(ALICE, 1.0) == 7
    assert attachments.identity_of(7) == ALICE
    assert attachments.forget(7)
    assert not attachments.forget(7)
    assert attachments.heard(ALICE, 2.0) is None
    assert attachments.identity_of(7) is None


def test_a_frontend_id_is_held_by_one_identity() -> None:
    """Another socket with the same id is refused as long as the first lives, then taken."""
    attachments = Attachments(silent_after_s=5)
    attachments.attach(ALICE, attach(7), 0.0)
    assert "7 is held" in str(attachments.attach(BOB, attach(7), 1.0))
    assert attachments.heard(BOB, 1.0) is None
    attachments.forget(7)
    assert attachments.attach(BOB, attach(7), 2.0) is None


def test_attaching_twice_is_no_harm_but_changing_the_id_is_refused() -> None:
    """An identity is one frontend."""
    attachments = Attachments(silent_after_s=5)
    attachments.attach(ALICE, attach(7), 0.0)
    assert attachments.attach(ALICE, attach(7), 1.0) is None
    assert "attached as frontend 7" in str(attachments.attach(ALICE, attach(8), 1.0))
    assert attachments.frontends() == [7]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (attach(7, PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}"),
        (attach(LAUNCHING_FRONTEND), "frontend id 0"),
        (attach(1 << 16), "frontend id 65536"),
    ],
)
def test_a_frontend_that_does_not_fit_is_refused_with_the_value(message: Attach, reason: str) -> None:
    """Version and id."""
    attachments = Attachments(silent_after_s=5)
    assert reason in str(attachments.attach(ALICE, message, 0.0))
    assert attachments.frontends() == []


def test_a_frontend_is_silent_after_the_limit_and_not_before() -> None:
    """Counted from its last message."""
    attachments = Attachments(silent_after_s=5)
    attachments.attach(ALICE, attach(7), 0.0)
    attachments.attach(BOB, attach(8), 0.0)
    attachments.heard(BOB, 3.0)
    assert attachments.silent(5.0) == []
    assert attachments.silent(5.1) == [7]


def _request(frontend_id: int) -> GenerationRequest:
    key = SequenceKey(ClientIds(frontend_id).draw())
    return GenerationRequest(key=key, prompt_ids=pack_tokens([1]), sampling=SamplingParams())


@pytest.mark.parametrize(
    ("frontend_id", "body", "reason"),
    [
        (7, _request(7), None),
        (7, _request(8), DropReason.FOREIGN_CLIENT_ID),
        (7, _request(LAUNCHING_FRONTEND), DropReason.FOREIGN_CLIENT_ID),
        (7, Abort(7 << 48), None),
        (7, Abort(8 << 48), DropReason.FOREIGN_CLIENT_ID),
        (7, Drain(), DropReason.FORBIDDEN),
        (7, Shutdown(1.0), DropReason.FORBIDDEN),
        (7, FrontendBeat(7), None),
        (7, Detach(7), None),
        (LAUNCHING_FRONTEND, _request(LAUNCHING_FRONTEND), None),
        (LAUNCHING_FRONTEND, _request(7), DropReason.FOREIGN_CLIENT_ID),
        (LAUNCHING_FRONTEND, Drain(), None),
        (LAUNCHING_FRONTEND, Shutdown(1.0), None),
        (LAUNCHING_FRONTEND, attach(7), DropReason.FORBIDDEN),
    ],
)
def test_a_frontend_speaks_for_itself_and_the_launching_one_alone_owns_the_worker(
    frontend_id: int, body: WorkerBound, reason: DropReason | None
) -> None:
    """Every kind of message, from both kinds of frontend."""
    assert why_not(frontend_id, body) is reason
