"""Calls as Hermes, Qwen and SmolLM models write them.

    words <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

What stands between the tags but is no call is words, tag included.
"""

import enum

from twostroke.frontend.tools.call_scanner import CallScanner, ScanState
from twostroke.frontend.tools.events import EventLog, ToolEvent, possible_start

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class _State(enum.Enum):
    WORDS = "words"
    CALL = "call"
    CLOSING = "closing"


class HermesParser:
    """See `ToolParser`."""

    def __init__(self) -> None:
        self._log = EventLog()
        self._state = _State.WORDS
        self._scanner = CallScanner(self._log)
        self._held = ""

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece."""
        self._held += text
        while self._advance():
            pass
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        """Words that looked like a tag, and a call that never got its name, are words."""
        if self._state is _State.WORDS:
            self._log.content(self._held)
        elif self._state is _State.CALL and not self._scanner.begun:
            self._log.content(OPENING + self._scanner.consumed)
        return self._log.finish()

    def _advance(self) -> bool:
        """Use up what is held as far as the state allows; whether the state changed."""
        match self._state:
            case _State.WORDS:
                return self._words()
            case _State.CALL:
                return self._call()
            case _State.CLOSING:
                return self._closing()

    def _words(self) -> bool:
        words, opening, rest = self._held.partition(OPENING)
        if opening:
            self._log.content(words)
            self._held = rest
            self._scanner = CallScanner(self._log)
            self._state = _State.CALL
            return True
        certain = len(self._held) - possible_start(self._held, OPENING)
        self._log.content(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _call(self) -> bool:
        scanner = self._scanner
        self._held = self._held[scanner.push(self._held) :]
        if scanner.state is ScanState.BROKEN:
            if not scanner.begun:
                self._log.content(OPENING + scanner.consumed)
            self._state = _State.WORDS
        elif scanner.state is ScanState.DONE:
            self._state = _State.CLOSING
        return self._state is not _State.CALL

    def _closing(self) -> bool:
        """Models sometimes leave the tag out."""
        rest = self._held.lstrip()
        if CLOSING.startswith(rest) and rest != CLOSING:
            return False
        self._held = rest.removeprefix(CLOSING) if rest.startswith(CLOSING) else self._held
        self._state = _State.WORDS
        return True
