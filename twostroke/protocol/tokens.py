"""Token ids on the wire: a buffer of little-endian int32, four bytes a token.

A list of msgpack integers costs one branch a token at both ends; a buffer is copied whole.
"""

import sys
from array import array
from collections.abc import Iterable

from twostroke.protocol.errors import ProtocolError

TOKEN_BYTES = 4
_SWAPPED = sys.byteorder == "big"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """`token_ids` as little-endian int32.

    Raises:
        OverflowError: An id does not fit 32 signed bits.
    """
    buffer = array("i", token_ids)
    if _SWAPPED:
        buffer.byteswap()
    return buffer.tobytes()


def unpack_tokens(buffer: bytes) -> list[int]:
    """The ids in `buffer`.

    Raises:
        ProtocolError: The length is not a multiple of four bytes.
    """
    try:
        if _SWAPPED:
            tokens = array("i", buffer)
            tokens.byteswap()
            return tokens.tolist()
        return memoryview(buffer).cast("i").tolist()  # half the time of an array, for the few tokens of one output
    except (TypeError, ValueError):
        message = f"a token buffer of {len(buffer)} bytes is not a whole number of int32 values"
        raise ProtocolError(message) from None


def token_count(buffer: bytes) -> int:
    """How many ids `buffer` holds."""
    return len(buffer) // TOKEN_BYTES
