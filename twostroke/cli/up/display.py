"""What a person sees while a launch starts: a live table on a terminal, plain lines elsewhere."""

import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from twostroke.cli.up.life import PartState

_STYLES = {PartState.READY: "green", PartState.FAILED: "red", PartState.RESTARTING: "yellow"}
_WAITING = {PartState.STARTING, PartState.LOADING, PartState.RESTARTING, PartState.STOPPING}


class Display(Protocol):
    """Shows steps of parts and lines of text."""

    def step(self, part: str, state: PartState, words: str) -> None:
        """A part took a step."""

    def say(self, text: str) -> None:
        """Print text of its own."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class LineDisplay:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()

    def step(self, part: str, state: PartState, words: str) -> None:
        """Print the step with the seconds since the launch began."""
        self.say(f"{time.monotonic() - self._begun:6.1f} s  {part:<14} {state}{': ' if words else ''}{words}")

    def say(self, text: str) -> None:
        """Print the text as it is, unwrapped, so that a long command can be copied."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to undo."""


class TableDisplay:
    """A table that is redrawn in place; text goes above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._rows: dict[str, tuple[PartState, str]] = {}
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8)
        self._live.start()

    def step(self, part: str, state: PartState, words: str) -> None:
        """Change the part's row."""
        self._rows[part] = (state, words)

    def say(self, text: str) -> None:
        """Print the text above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the table a last time, and stop redrawing."""
        self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, (state, words) in self._rows.items():
            mark = self._spinner if state in _WAITING else Text("*" if state is PartState.READY else " ")
            table.add_row(mark, part, Text(state, style=_STYLES.get(state, "")), Text(words, style="dim"))
        if any(state in _WAITING for state, _ in self._rows.values()):
            table.add_row("", "", Text(f"{time.monotonic() - self._begun:.0f} s", style="dim"))
        return table


def make_display(console: Console) -> Display:
    """The display that suits the console."""
    return TableDisplay(console) if console.is_terminal else LineDisplay(console)
