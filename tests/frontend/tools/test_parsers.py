"""Tool calls are told apart from words, and however the text is cut, the same comes of it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.frontend.tools.events import Arguments, CallBegun, Content, ToolEvent, ToolParser, joined
from twostroke.frontend.tools.hermes import HermesParser
from twostroke.frontend.tools.llama_json import LlamaJsonParser

NAMES = ("f", "g")


def llama() -> LlamaJsonParser:
    """A Llama parser that knows `NAMES`."""
    return LlamaJsonParser(NAMES)


def read(parser: ToolParser, *pieces: str) -> list[ToolEvent]:
    """All events of a text given in pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[ToolEvent]:
    """The events of one call."""
    return [CallBegun(index, name), Arguments(index, arguments)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. ", [Content("Hello there. ")]),
        ("", []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', call(0, "f", '{"x": 1}')),
        (
            'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nDone',
            [Content("Let me see."), *call(0, "f", "{}"), Content("\nDone")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name":"g"}',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        ('<tool_call>{"arguments": {"x": [1, "}"]}, "name": "f"}</tool_call>', call(0, "f", '{"x": [1, "}"]}')),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', call(0, "f", '{"x": 1}')),
        ('<tool_call>{"name": "f", "arguments": null, "id": 7}</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\\"}', [CallBegun(0, "f"), Arguments(0, '{"x": "a\\"}')]),
        ("a < b <tool", [Content("a < b <tool")]),
        ("<tool_call>no call</tool_call>", [Content("<tool_call>no call</tool_call>")]),
        ('<tool_call>{"nam', [Content('<tool_call>{"nam')]),
        ('<tool_call>{"name": 3}</tool_call>', [Content('<tool_call>{"name": 3}</tool_call>')]),
    ],
)
def test_hermes(text: str, expected: list[ToolEvent]) -> None:
    """Tags hold calls; what is none stays words; whatever else is around a call is kept."""
    assert read(HermesParser(), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello {there}", [Content("Hello {there}")]),
        ('{"name": "f", "parameters": {"x": 1}}', call(0, "f", '{"x": 1}')),
        ('<|python_tag|>{"name": "f", "parameters": {}}', call(0, "f", "{}")),
        ('Sure. <|python_tag|>{"name": "f", "parameters": {}}', [Content("Sure."), *call(0, "f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        ('{"name": "h", "parameters": {}}', [Content('{"name": "h", "parameters": {}}')]),
        ('{"answer": [1, 2]}', [Content('{"answer": [1, 2]}')]),
        ('{"name": "f", "parameters": {}} there', [*call(0, "f", "{}"), Content(" there")]),
        (' {"na', [Content(' {"na')]),
    ],
)
def test_llama_json(text: str, expected: list[ToolEvent]) -> None:
    """An answer that begins with a call of a known tool is one; any other JSON is words."""
    assert read(llama(), text) == expected


def test_arguments_come_as_they_are_written() -> None:
    """A client sees the name and each piece of the arguments at once, and nothing of the syntax around."""
    parser = HermesParser()
    assert parser.push('<tool_call>\n{"name": "f"') == [CallBegun(0, "f")]
    assert parser.push(', "arguments": {"city": "Pa') == [Arguments(0, '{"city": "Pa')]
    assert parser.push('ris"') == [Arguments(0, 'ris"')]
    assert parser.push("}}\n</tool_c") == [Arguments(0, "}")]
    assert parser.push("all>") == []
    assert parser.finish() == []


PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "<tool",
            "; ",
            "\n",
            " ",
            "é",
            "{",
            "}",
            '"',
            "\\",
            "[1]",
            ",",
        ),
        *('{"name": "f", "arguments": {"x": "}"}}', '{"name": "g", "parameters": {"y": [1, {"z": "\\""}]}}'),
        *('{"parameters": "{}", "name": "g"}', '{"name": "f"', '"arguments": {', "words", '"name": ', ": ", "null"),
    ]
)


@pytest.mark.parametrize("make", [HermesParser, llama])
@given(text=st.lists(PARTS, max_size=12).map("".join), seed=st.integers(0, 1 << 30))
def test_the_cut_does_not_matter(make: Callable[[], ToolParser], text: str, seed: int) -> None:
    """Whole, in single characters, or cut anywhere: the same events, and no character of plain words is lost."""
    draw = random.Random(seed)
    whole = read(make(), text)
    assert read(make(), *text) == whole
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make(), *pieces) == whole
    if not any(isinstance(event, CallBegun) for event in whole) and "<|python_tag|>" not in text:
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text
