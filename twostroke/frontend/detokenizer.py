"""Token ids to text as they arrive: what is given out is final, and together it is what decoding all ids at once gives.

A token may hold part of a character. Two kinds of tails are therefore held back until more tokens settle them:

* a U+FFFD at the end of the text: its bytes may be the start of a character (byte-level vocabularies). Decoders put one
  for each run of bytes that could begin a character, so the U+FFFDs before it are certain;
* byte tokens such as `<0xE2>`: their decoder looks at a whole run of them, and one wrong byte turns all of the run into
  replacement characters.

Decoding also depends on the tokens before (a leading space is stripped at the start of a text only), so each step
decodes the new tokens together with a few tokens before them, whose own text is cut off again. Special tokens have no
text and are left out before decoding.

In byte-level vocabularies none of this is needed (`ByteDetokenizer`): there text is the bytes of its tokens, and a
character that is not whole yet is all that can be held back. That takes a fourth of the time.
"""

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"


class Vocabulary(Protocol):
    """What a detokenizer asks of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        ...

    def is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one byte, as `<0xE2>` does."""
        ...

    def is_silent(self, token_id: int) -> bool:
        """Whether a token never has text: a special token, or an id beyond the vocabulary."""
        ...


class TextStream(Protocol):
    """Gives the text of one sequence's tokens as they come."""

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens; returns the text that is certain now, "" if none is."""
        ...

    def finish(self) -> str:
        """The text held back: nothing follows that could settle it."""
        ...


class Detokenizer:
    """Decodes one sequence incrementally.

    Args:
        vocabulary: Decodes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []  # context, whose text is out already, and then the tokens whose text is held
        self._given = 0  # characters of the window's text that are out
        self._context = 0  # tokens of the window that are context

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens; returns the text that is certain now, "" if none is."""
        audible = [token for token in token_ids if not self._vocabulary.is_silent(token)]
        if not audible:
            return ""
        self._window += audible
        if self._vocabulary.is_byte(self._window[-1]):
            return ""
        text = self._vocabulary.decode(self._window)
        open_end = text.endswith(REPLACEMENT)
        certain = len(text) - open_end
        if certain <= self._given:
            return ""
        new = text[self._given : certain]
        # The tokens decoded just now are enough context for the next ones, and all of an open end is in them.
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._vocabulary.decode(self._window)) - open_end
        return new

    def finish(self) -> str:
        """The text held back, as it is: nothing follows that could settle it."""
        text = self._vocabulary.decode(self._window)[self._given :] if self._window else ""
        self._window, self._given, self._context = [], 0, 0
        return text


class ByteDetokenizer:
    """Decodes one sequence of a byte-level vocabulary incrementally.

    Args:
        bytes_of: The bytes of a token id; b"" for one without text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._held = b""

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens; returns the text that is certain now, "" if none is."""
        data = self._held + b"".join(map(self._bytes_of, token_ids))
        text, decoded = codecs.utf_8_decode(data, "replace", False)
        self._held = data[decoded:]
        return text

    def finish(self) -> str:
        """The text held back, as it is: nothing follows that could settle it."""
        return self._held.decode(errors="replace")
