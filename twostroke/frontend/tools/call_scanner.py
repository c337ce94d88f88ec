"""Reads the JSON object of one call, `{"name": NAME, "arguments": {...}}`, while it is written.

    START --{--> KEY --"key"--> COLON --:--> VALUE --its end--> NEXT --,--> KEY
                  |                                              |
                  +--}-------------------------------------------+--}--> DONE
    any --a character that cannot stand there--> BROKEN (it is not consumed)

The arguments (`parameters` in some families) are given on as the model writes them, from the moment that the name is
known. Arguments that are a string hold JSON themselves, and are given decoded, at their end.
"""

import enum
import json
from collections.abc import Callable

from twostroke.frontend.tools.events import EventLog

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_BLANK = " \t\r\n"


class ScanState(enum.Enum):
    """Where in the object; see the module."""

    START = "start"
    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    NEXT = "next"
    DONE = "done"
    BROKEN = "broken"


class CallScanner:
    """Reads one object.

    Args:
        log: Told of the call.
        known: Whether a name may be called; a call of another one is no call, but broken.
    """

    def __init__(self, log: EventLog, known: Callable[[str], bool] = lambda _: True) -> None:
        self._log = log
        self._known = known
        self.state = ScanState.START
        self.begun = False
        self.consumed = ""
        self._key: str | None = None
        self._value = JsonExtent()
        self._waiting: str | None = None  # arguments that came before the name
        self._has_arguments = False

    @property
    def ended(self) -> bool:
        """Whether nothing more belongs to the object."""
        return self.state in (ScanState.DONE, ScanState.BROKEN)

    def push(self, text: str) -> int:
        """Take a piece; returns how many of its characters belong to the object."""
        for position, char in enumerate(text):
            if not self.ended:
                self._take(char)
                if self.state is not ScanState.BROKEN:
                    self.consumed += char
                    continue
            return position
        return len(text)

    def _take(self, char: str) -> None:
        match self.state, char:
            case ScanState.KEY, _:
                self._take_key(char)
            case ScanState.VALUE, _:
                self._take_value(char)
            case _, _ if char in _BLANK:
                pass
            case ScanState.START, "{":
                self.state = ScanState.KEY
            case ScanState.COLON, ":":
                self.state = ScanState.VALUE
            case ScanState.NEXT, ",":
                self.state = ScanState.KEY
            case ScanState.NEXT, "}":
                self._end()
            case _:
                self.state = ScanState.BROKEN

    def _take_key(self, char: str) -> None:
        if self._value.open or char == '"':
            self._value.push(char)
            if self._value.complete:
                self._key = _text_of(self._take_text())
                self.state = ScanState.COLON if self._key is not None else ScanState.BROKEN
        elif char == "}":
            self._end()
        elif char not in _BLANK:
            self.state = ScanState.BROKEN

    def _take_value(self, char: str) -> None:
        value = self._value
        if not value.open and char in _BLANK:
            return
        if not value.push(char):
            # A number or a word ends before the character that follows it.
            self._end_value()
            if self.state is ScanState.NEXT:
                self._take(char)
            return
        if self._streams:
            self._log.arguments(char)
        if value.complete:
            self._end_value()

    def _take_text(self) -> str:
        """The value's text; a new one begins."""
        value, self._value = self._value, JsonExtent()
        return value.text

    @property
    def _streams(self) -> bool:
        """Whether the value is arguments that go on at once."""
        return self._is_arguments and self.begun and self._value.nested

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._has_arguments

    def _end_value(self) -> None:
        streamed, is_arguments = self._streams, self._is_arguments
        nested = self._value.nested
        raw = self._take_text()
        self.state = ScanState.NEXT if raw else ScanState.BROKEN
        if is_arguments:
            self._has_arguments = True
            if not streamed:
                self._waiting = raw if nested else _inner(raw)
        elif self._key == "name" and not self.begun:
            self._begin(_text_of(raw))
        if self.begun and self._waiting is not None:
            self._log.arguments(self._waiting)
            self._waiting = None

    def _begin(self, name: str | None) -> None:
        if name is None or not self._known(name):
            self.state = ScanState.BROKEN
            return
        self.begun = True
        self._log.begin(name)

    def _end(self) -> None:
        self.state = ScanState.DONE if self.begun else ScanState.BROKEN
        if self.begun and not self._has_arguments:
            self._log.arguments("{}")


class JsonExtent:
    """Finds where one JSON value ends; what stands inside is not checked."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.complete = False

    @property
    def open(self) -> bool:
        """Whether a value has begun."""
        return bool(self._raw)

    @property
    def nested(self) -> bool:
        """Whether it is an object or an array."""
        return self._raw[:1] == ["{"] or self._raw[:1] == ["["]

    def push(self, char: str) -> bool:
        """Take a character; False if it stands behind the value, and was not taken."""
        if (
            not (self._in_string or self._closers)
            and self._raw
            and self._raw[0] not in '"{['
            and char in ",}]" + _BLANK
        ):
            return False
        if not self.open and char in ",}]:":
            return False
        self._raw.append(char)
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif self._closers and char == self._closers[-1]:
            self._closers.pop()
        self.complete = self._raw[0] in '"{[' and not self._in_string and not self._closers
        return True

    @property
    def text(self) -> str:
        """The value as it was written."""
        return "".join(self._raw)


def _text_of(raw: str) -> str | None:
    """The text that a JSON string stands for; None if it is none."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _inner(raw: str) -> str:
    """Arguments that are no object: a string is JSON in JSON, and null is none."""
    text = _text_of(raw)
    return text if text is not None else "{}" if raw == "null" else raw
