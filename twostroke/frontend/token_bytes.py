"""The bytes behind each token: with logprobs, clients rebuild text from tokens that hold part of a character.

In byte-level vocabularies a text is nothing but the bytes of its tokens, so that there they are also what is decoded.

Three spellings occur in vocabularies: byte-level (each byte is a printable stand-in, GPT-2's table), byte tokens
(`<0xE2>`), and plain text with `▁` for a space.
"""

import functools
import re

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHED_TOKENS = 65536


class TokenBytes:
    """Looks up tokens of one tokenizer.

    Args:
        tokenizer: Its decoder tells the spelling.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.of = functools.lru_cache(CACHED_TOKENS)(self._of)
        """The bytes that a token id stands for; b"" for an unknown id."""
        self.decoded = functools.lru_cache(CACHED_TOKENS)(self._decoded)
        """The bytes that a byte-level decoder makes of a token id; b"" for one without text."""

    def _of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return _bytes_of_stand_ins(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def _decoded(self, token_id: int) -> bytes:
        """Unlike `_of`, for added tokens too: the decoder knows no difference, and special ones have no text."""
        added = self._tokenizer.get_added_tokens_decoder().get(token_id)
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None or (added is not None and added.special) else _bytes_of_stand_ins(token)


def byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the tokens that stand for one byte each, as `<0xE2>` does."""
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


def _bytes_of_stand_ins(token: str) -> bytes:
    table = _byte_of_stand_in()
    return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()


@functools.cache
def _byte_of_stand_in() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    themselves = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + n): byte for n, byte in enumerate(others)}
