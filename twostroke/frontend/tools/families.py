"""Which syntax a model calls tools in: the chat template tells, unless the configuration does."""

from collections.abc import Sequence

from twostroke.frontend.tools import hermes, llama_json
from twostroke.frontend.tools.events import ToolParser
from twostroke.protocol.config import ToolFamily

_MARKS = (
    (hermes.OPENING, ToolFamily.HERMES),
    (llama_json.MARK, ToolFamily.LLAMA_JSON),
    ('{"name": function name, "parameters":', ToolFamily.LLAMA_JSON),
)


def family_of(template: str) -> ToolFamily | None:
    """The family of a chat template; None if it renders tools in a syntax of its own.

    A template that does not render tools at all is taken for one of the Hermes family: `instructions` says to the model
    what a template of that family would.
    """
    for mark, family in _MARKS:
        if mark in template:
            return family
    return None if renders_tools(template) else ToolFamily.HERMES


def renders_tools(template: str) -> bool:
    """Whether a template does anything with tools."""
    return "tools" in template


def make_parser(family: ToolFamily, names: Sequence[str]) -> ToolParser:
    """A parser for one answer; `names` are the tools that may be called."""
    return llama_json.LlamaJsonParser(names) if family is ToolFamily.LLAMA_JSON else hermes.HermesParser()
