"""What a person sees while a cluster starts, and the command that they are given."""

import io
import json
import shlex

from rich.console import Console

from twostroke.cli.up.command import curl_line
from twostroke.cli.up.display import LineDisplay, TableDisplay, make_display
from twostroke.cli.up.life import PartState
from twostroke.protocol.config import ClusterConfig, ModelConfig, SecurityConfig


def console(*, terminal: bool) -> Console:
    """A console that writes into memory."""
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def text_of(shown: Console) -> str:
    """What was written to it."""
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_elsewhere_than_on_a_terminal_each_step_is_one_plain_line() -> None:
    """Readable in a log: no colours, no redrawing."""
    shown = console(terminal=False)
    display = make_display(shown)
    assert isinstance(display, LineDisplay)
    display.step("context-0", PartState.LOADING, "loading weights [1/2]")
    display.step("router", PartState.STOPPED, "")
    display.close()
    first, second = text_of(shown).splitlines()
    assert first.endswith("s  context-0      loading: loading weights [1/2]")
    assert second.endswith("s  router         stopped")
    assert "\x1b" not in text_of(shown)


def test_a_long_command_is_not_wrapped() -> None:
    """It will be copied."""
    shown = console(terminal=False)
    make_display(shown).say("x" * 300)
    assert text_of(shown) == "x" * 300 + "\n"


def test_on_a_terminal_each_part_has_one_row() -> None:
    """The last state of each is what remains."""
    shown = console(terminal=True)
    display = make_display(shown)
    assert isinstance(display, TableDisplay)
    display.step("context-0", PartState.STARTING, "")
    display.step("context-0", PartState.READY, "http://127.0.0.1:1")
    display.say("hello")
    display.close()
    rows = [line for line in text_of(shown).splitlines() if "context-0" in line]
    assert "ready" in rows[-1]
    assert "starting" not in rows[-1]
    assert "hello" in text_of(shown)


def test_the_curl_line_survives_a_shell() -> None:
    """Whatever the model is called."""
    config = ClusterConfig(model=ModelConfig(path="/m", served_name="it's mine"))
    words = shlex.split(curl_line("http://127.0.0.1:8000", config))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's mine"
    assert not any("Authorization" in word for word in words)


def test_the_curl_line_says_where_an_api_key_goes() -> None:
    """If the cluster asks for one. The key itself is not shown."""
    config = ClusterConfig(model=ModelConfig(path="/m"), security=SecurityConfig(api_keys_file="/keys"))
    assert "Authorization: Bearer YOUR_API_KEY" in shlex.split(curl_line("http://h:1", config))
