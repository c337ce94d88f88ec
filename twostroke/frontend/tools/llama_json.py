"""Calls as Llama 3 models write them: an answer that begins with the JSON of a call, or has some after its mark.

    {"name": "f", "parameters": {"x": 1}}
    <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

Nothing but the name tells a call from an answer in JSON, so that only the request's own tools are called.
"""

import enum
from collections.abc import Collection

from twostroke.frontend.tools.call_scanner import CallScanner, ScanState
from twostroke.frontend.tools.events import EventLog, ToolEvent, possible_start

MARK = "<|python_tag|>"
SEPARATOR = ";"


class _State(enum.Enum):
    START = "start"  # a call, or a mark, may begin here
    WORDS = "words"
    CALL = "call"
    NEXT = "next"  # behind a call


class LlamaJsonParser:
    """See `ToolParser`.

    Args:
        names: The request's tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._log = EventLog()
        self._state = _State.START
        self._scanner = self._new_scanner()
        self._held = ""

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece."""
        self._held += text
        while self._advance():
            pass
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        """Whatever looked like the beginning of a call is words."""
        if self._state is _State.CALL:
            self._log.content("" if self._scanner.begun else self._scanner.consumed)
        else:
            self._log.content(self._held)
        return self._log.finish()

    def _advance(self) -> bool:
        """Use up what is held as far as the state allows; whether the state changed."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.WORDS:
                return self._words()
            case _State.CALL:
                return self._call()
            case _State.NEXT:
                return self._next()

    def _start(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(MARK):
            self._held = rest.removeprefix(MARK)
            return True
        if MARK.startswith(rest):
            return False
        self._state = _State.CALL if rest.startswith("{") else _State.WORDS
        self._scanner = self._new_scanner()
        return True

    def _words(self) -> bool:
        words, mark, rest = self._held.partition(MARK)
        if mark:
            self._log.content(words)
            self._held = rest
            self._state = _State.START
            return True
        certain = len(self._held) - possible_start(self._held, MARK)
        self._log.content(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _call(self) -> bool:
        scanner = self._scanner
        self._held = self._held[scanner.push(self._held) :]
        if scanner.state is ScanState.BROKEN:
            if not scanner.begun:
                self._log.content(scanner.consumed)
            self._state = _State.WORDS
        elif scanner.state is ScanState.DONE:
            self._state = _State.NEXT
        return self._state is not _State.CALL

    def _next(self) -> bool:
        """Another call may follow, behind a separator or at once."""
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest.startswith(SEPARATOR):
            self._held = rest.removeprefix(SEPARATOR)
        self._state = _State.START
        return True

    def _new_scanner(self) -> CallScanner:
        return CallScanner(self._log, self._names.__contains__)
