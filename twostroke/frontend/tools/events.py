"""What a model's text says once its tool calls are told apart from its words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins; `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments: all pieces together are one JSON text."""

    index: int
    text: str


ToolEvent = Content | CallBegun | Arguments


class ToolParser(Protocol):
    """Reads one answer, in pieces; what comes of it does not depend on how the text was cut."""

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece, and give what is certain by now."""
        ...

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: give what was held back."""
        ...


class EventLog:
    """Collects the events of one answer.

    White space before and after calls belongs to their syntax, so that at the end of a text waits for what follows.
    """

    def __init__(self) -> None:
        self._events: list[ToolEvent] = []
        self._calls = 0
        self._blank = ""

    def content(self, text: str) -> None:
        """The model says `text`."""
        text = self._blank + text
        visible = text.rstrip()
        self._blank = text[len(visible) :]
        if visible:
            self._events.append(Content(visible))

    def begin(self, name: str) -> None:
        """The model calls `name`."""
        self._blank = ""
        self._events.append(CallBegun(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the newest call."""
        if text:
            self._events.append(Arguments(self._calls - 1, text))

    def take(self) -> list[ToolEvent]:
        """The events since the last time, joined where they continue each other."""
        events, self._events = self._events, []
        return joined(events)

    def finish(self) -> list[ToolEvent]:
        """The last events; words that end in white space keep it."""
        if self._blank and not self._calls:
            self._events.append(Content(self._blank))
        return self.take()


def joined(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """`events` with neighbours of one text made one."""
    joint: list[ToolEvent] = []
    for event in events:
        match joint[-1:], event:
            case [Content(before)], Content(text):
                joint[-1] = Content(before + text)
            case [Arguments(index, before)], Arguments(same, text) if same == index:
                joint[-1] = Arguments(index, before + text)
            case _:
                joint.append(event)
    return joint


def possible_start(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with, but for the whole marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-size:])), 0)
