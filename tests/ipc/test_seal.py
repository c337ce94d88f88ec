"""Local messages are authenticated before they are decoded; replays and reordering are refused."""

import pytest

from twostroke.ipc.drops import DropReason
from twostroke.ipc.seal import Direction, Sealer, SealError, Session, Unsealer

SESSION = Session(epoch=5, nonce=b"n" * 16, key=b"k" * 32)


def refused(unsealer: Unsealer, frames: list[bytes]) -> DropReason:
    """Why `frames` are refused."""
    with pytest.raises(SealError) as error:
        unsealer.unseal(frames)
    return error.value.reason


def test_sealed_messages_open_in_order() -> None:
    """Same session and direction."""
    sealer, unsealer = Sealer(SESSION, Direction.REQUEST), Unsealer(SESSION, Direction.REQUEST)
    assert [unsealer.unseal(sealer.seal(text)) for text in (b"a", b"", b"c")] == [b"a", b"", b"c"]


def test_a_replayed_message_is_refused() -> None:
    """The counter did not rise."""
    sealer, unsealer = Sealer(SESSION, Direction.REQUEST), Unsealer(SESSION, Direction.REQUEST)
    frames = sealer.seal(b"a")
    unsealer.unseal(frames)
    assert refused(unsealer, frames) is DropReason.REPLAYED


def test_a_reordered_message_is_refused_and_the_next_is_not() -> None:
    """Once the second was taken the first is late."""
    sealer, unsealer = Sealer(SESSION, Direction.REQUEST), Unsealer(SESSION, Direction.REQUEST)
    first, second, third = sealer.seal(b"1"), sealer.seal(b"2"), sealer.seal(b"3")
    assert unsealer.unseal(second) == b"2"
    assert refused(unsealer, first) is DropReason.REPLAYED
    assert unsealer.unseal(third) == b"3"


@pytest.mark.parametrize(
    "other",
    [
        Session(epoch=6, nonce=SESSION.nonce, key=SESSION.key),
        Session(epoch=5, nonce=b"x" * 16, key=SESSION.key),
        Session(epoch=5, nonce=SESSION.nonce, key=b"x" * 32),
    ],
)
def test_a_message_of_another_session_is_refused(other: Session) -> None:
    """Epoch, nonce and key are all under the MAC."""
    assert (
        refused(Unsealer(SESSION, Direction.RESULT), Sealer(other, Direction.RESULT).seal(b"a")) is DropReason.BAD_MAC
    )


def test_a_message_cannot_be_reflected_into_another_direction() -> None:
    """A request is no result."""
    frames = Sealer(SESSION, Direction.REQUEST).seal(b"a")
    assert refused(Unsealer(SESSION, Direction.RESULT), frames) is DropReason.BAD_MAC


def test_every_changed_byte_is_noticed() -> None:
    """Each byte of header and payload in turn."""
    header, payload = Sealer(SESSION, Direction.REQUEST).seal(b"hello")
    message = header + payload
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        frames = [bytes(changed[: len(header)]), bytes(changed[len(header) :])]
        assert refused(Unsealer(SESSION, Direction.REQUEST), frames) is DropReason.BAD_MAC


@pytest.mark.parametrize("frames", [[], [b"a"], [b"short", b"payload"], [b"h" * 40, b"a", b"b"]])
def test_frames_of_another_form_are_refused(frames: list[bytes]) -> None:
    """Before any MAC is computed."""
    assert refused(Unsealer(SESSION, Direction.REQUEST), frames) is DropReason.MALFORMED


def test_a_forged_counter_does_not_move_the_receiver() -> None:
    """A message that fails its MAC must not make later ones look like replays."""
    sealer, unsealer = Sealer(SESSION, Direction.REQUEST), Unsealer(SESSION, Direction.REQUEST)
    forged = [b"\xff" * 8 + bytes(32), b"a"]
    assert refused(unsealer, forged) is DropReason.BAD_MAC
    assert unsealer.unseal(sealer.seal(b"a")) == b"a"


def test_a_session_needs_full_length_secrets_and_does_not_show_them() -> None:
    """Lengths in the error, no values in `repr`."""
    with pytest.raises(ValueError, match="not 3 and 16"):
        Session(epoch=5, nonce=b"n" * 16, key=b"abc")
    assert "kkkk" not in repr(SESSION)
