"""Signed handles."""

import msgspec
import pytest

from kvtransfer.handles import handle_key, sign_handle, verify_handle
from tests.support.transfer import LAYOUT, SECRET
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import TransferHandle

HANDLE = TransferHandle(
    version=1, epoch=3, key=SequenceKey(1), address="tcp://a:1", layout=LAYOUT, blocks=2, expires_in_s=1.0
)


def test_a_handle_survives_the_wire_and_verifies() -> None:
    """Encoding and decoding change nothing that is signed."""
    key = handle_key(SECRET)
    signed = sign_handle(key, HANDLE)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=TransferHandle)
    assert verify_handle(key, decoded)
    assert len(signed.mac) == 32


@pytest.mark.parametrize(
    "change",
    [{"epoch": 4}, {"key": SequenceKey(2)}, {"address": "tcp://b:1"}, {"blocks": 3}, {"mac": b""}, {"mac": bytes(32)}],
)
def test_any_change_is_noticed(change: dict[str, object]) -> None:
    """Each field is under the MAC, and no MAC is no MAC."""
    key = handle_key(SECRET)
    assert not verify_handle(key, msgspec.structs.replace(sign_handle(key, HANDLE), **change))


def test_other_secrets_give_other_keys() -> None:
    """A handle of one cluster means nothing in another, and the secret itself is not the key."""
    assert not verify_handle(handle_key(bytes(32)), sign_handle(handle_key(SECRET), HANDLE))
    assert handle_key(SECRET) != SECRET
