"""Logprobs of a prompt's tokens, in buffers: a long prompt has many, and a list of objects costs a branch a number.

The first token of a prompt has none, since nothing comes before it.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.tokens import pack_tokens, token_count, unpack_tokens

FLOAT_BYTES = 4


class PromptTokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position of a prompt, of the raw distribution.

    Attributes:
        chosen: Logprob of the token that stands there (nats).
        rank: 1 if no token was likelier, 2 if one was, and so on.
        top_ids: The likeliest tokens, likeliest first; as many as were asked for.
        top: Their logprobs, same order.
    """

    chosen: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive prompt tokens; all buffers are little-endian.

    Attributes:
        chosen: float32: logprob of each token.
        ranks: int32: its rank.
        top_ids: int32: the likeliest tokens there, likeliest first; the same number for each token.
        top: float32: their logprobs.
    """

    chosen: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top: bytes = b""

    @classmethod
    def pack(
        cls,
        chosen: Iterable[float],
        ranks: Iterable[int],
        top_ids: Iterable[Sequence[int]],
        top: Iterable[Sequence[float]],
    ) -> "PromptLogprobs":
        """Buffers of the given values; the last two have one row a token, all of one length."""
        return cls(
            _pack_floats(chosen),
            pack_tokens(ranks),
            b"".join(map(pack_tokens, top_ids)),
            b"".join(map(_pack_floats, top)),
        )

    @classmethod
    def join(cls, parts: Sequence["PromptLogprobs"]) -> "PromptLogprobs":
        """All parts of one prompt as one."""
        return cls(
            b"".join(part.chosen for part in parts),
            b"".join(part.ranks for part in parts),
            b"".join(part.top_ids for part in parts),
            b"".join(part.top for part in parts),
        )

    def unpack(self) -> list[PromptTokenLogprobs]:
        """One entry a token.

        Raises:
            ProtocolError: The buffers do not go together.
        """
        count = token_count(self.ranks)
        chosen, ranks = _unpack_floats(self.chosen), unpack_tokens(self.ranks)
        top_ids, top = unpack_tokens(self.top_ids), _unpack_floats(self.top)
        width = len(top_ids) // count if count else 0
        if len(chosen) != count or len(top) != len(top_ids) or width * count != len(top_ids):
            raise ProtocolError(
                f"prompt logprobs do not go together: {len(chosen)} logprobs, {count} ranks, {len(top_ids)} likely "
                f"tokens with {len(top)} logprobs"
            )
        return [
            PromptTokenLogprobs(
                chosen[row],
                ranks[row],
                tuple(top_ids[row * width : (row + 1) * width]),
                tuple(top[row * width : (row + 1) * width]),
            )
            for row in range(count)
        ]


def _pack_floats(values: Iterable[float]) -> bytes:
    buffer = array("f", values)
    if sys.byteorder == "big":
        buffer.byteswap()
    return buffer.tobytes()


def _unpack_floats(buffer: bytes) -> list[float]:
    if len(buffer) % FLOAT_BYTES:
        raise ProtocolError(f"a buffer of {len(buffer)} bytes is not a whole number of float32 values")
    values = array("f")
    values.frombytes(buffer)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
