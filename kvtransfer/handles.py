"""Signing and checking transfer handles.

A handle travels through the router and comes back from a generation worker, so the context worker signs what it hands
out: HMAC-SHA256 over every other field, with a key of its own derived from the cluster secret (HKDF-SHA256).
"""

import hashlib
import hmac

import msgspec

from twostroke.ipc.curve import hkdf_sha256
from twostroke.protocol.transfer import TransferHandle

_PURPOSE = b"twostroke transfer handle"


def handle_key(secret: bytes) -> bytes:
    """The 32-byte MAC key that the cluster `secret` gives for handles."""
    return hkdf_sha256(secret, _PURPOSE, hashlib.sha256().digest_size)


def handle_mac(key: bytes, handle: TransferHandle) -> bytes:
    """HMAC-SHA256 over `handle` with an empty `mac` field."""
    unsigned = msgspec.structs.replace(handle, mac=b"")
    return hmac.digest(key, msgspec.msgpack.encode(unsigned), "sha256")


def sign_handle(key: bytes, handle: TransferHandle) -> TransferHandle:
    """`handle` with its MAC."""
    return msgspec.structs.replace(handle, mac=handle_mac(key, handle))


def verify_handle(key: bytes, handle: TransferHandle) -> bool:
    """Whether `handle` was signed with `key`; takes the same time wherever the MACs differ."""
    return hmac.compare_digest(handle.mac, handle_mac(key, handle))
