"""How one chat uses tools: which may be called, whether one must be, and in which syntax."""

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostroke.frontend.structured_output import build, checked, read_constraint
from twostroke.frontend.tools.call_grammar import answer_or_calls_grammar, calls_grammar
from twostroke.frontend.tools.events import ToolParser
from twostroke.frontend.tools.families import make_parser
from twostroke.protocol.config import ToolFamily
from twostroke.protocol.constraint import Constraint, ConstraintKind
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import ChatBody, SamplingFields, TokenizeBody
from twostroke.protocol.openai_tools import NamedTool, Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}


class ToolMode(enum.Enum):
    """Whether the model must call a tool."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one chat, at least one.

    Attributes:
        tools: What may be called, and is shown to the model.
        mode: Whether it must be.
        named: The one that must be, in mode `NAMED`.
        several: Whether one answer may hold several calls.
        family: The model's syntax.
    """

    tools: Sequence[Tool]
    mode: ToolMode
    named: str | None
    several: bool
    family: ToolFamily

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [tool.function.name for tool in self.tools]

    def parser(self) -> ToolParser:
        """A parser for one answer."""
        return make_parser(self.family, self.names)

    def definitions(self) -> list[Mapping[str, object]]:
        """The tools as chat templates expect them."""
        return [_definition(tool) for tool in self.tools]

    async def constraint(self, fields: SamplingFields) -> Constraint | None:
        """What the answer must look like, by its tools and by the other fields together.

        Raises:
            InvalidRequestError: A schema is wrong, or the fields do not go together.
        """
        own = await read_constraint(fields)
        if self.mode is ToolMode.AUTO and own is None:
            return None
        if own is not None and self.mode is not ToolMode.AUTO:
            message = (
                "tool_choice forces calls, which leaves no room for an answer of another form; leave one of both out"
            )
            raise InvalidRequestError(message, "tool_choice")
        if own is not None and own.kind is not ConstraintKind.JSON_SCHEMA:
            message = "tools go with an answer in JSON, but with no other constraint; leave one of both out"
            raise InvalidRequestError(message, "tools")
        answer = None if own is None else json.loads(own.text)
        for number, tool in enumerate(self.tools):
            param = f"tools[{number}].function.parameters"
            await checked(build(ConstraintKind.JSON_SCHEMA, json.dumps(_arguments(tool)), param), param)
        return await checked(build(ConstraintKind.LARK, self._grammar(answer), "tools"), "tools")

    def _grammar(self, answer: Mapping[str, object] | None) -> str:
        callable_tools = [tool for tool in self.tools if self.named in (None, tool.function.name)]
        schemas = {tool.function.name: _arguments(tool) for tool in callable_tools}
        several = self.several and self.mode is not ToolMode.NAMED
        if answer is None:
            return calls_grammar(self.family, schemas, several=several)
        return answer_or_calls_grammar(self.family, schemas, answer, several=several)


def read_tools(fields: ChatBody | TokenizeBody, family: ToolFamily | None) -> ToolUse | None:
    """How a chat uses tools; None if it uses none, which `tool_choice` of `none` says too.

    Args:
        fields: The request.
        family: The model's syntax; None if it is not known.

    Raises:
        InvalidRequestError: A tool or the choice is wrong, or the model's syntax is not known.
    """
    tools, choice = fields.tools or [], fields.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools to choose from", "tool_choice")
        return None
    _check(tools)
    mode, named = _mode(choice, tools)
    if mode is None:
        return None
    if family is None:
        message = (
            "tools: the syntax of this model's tool calls is not known; set the server's option frontend.tool_family"
        )
        raise InvalidRequestError(message, "tools")
    several = isinstance(fields, TokenizeBody) or fields.parallel_tool_calls is not False
    return ToolUse(tools, mode, named, several, family)


def _mode(choice: str | NamedTool | None, tools: Sequence[Tool]) -> tuple[ToolMode | None, str | None]:
    match choice:
        case None | "auto":
            return ToolMode.AUTO, None
        case "none":
            return None, None
        case "required":
            return ToolMode.REQUIRED, None
        case NamedTool("function", function):
            if function.name not in [tool.function.name for tool in tools]:
                message = f"tool_choice: no tool has the name `{function.name}`"
                raise InvalidRequestError(message, "tool_choice.function.name")
            return ToolMode.NAMED, function.name
    message = "tool_choice must be none, auto, required or a tool of type function"
    raise InvalidRequestError(message, "tool_choice")


def _check(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must hold at most {MAX_TOOLS} tools, not {len(tools)}", "tools")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        name, param = tool.function.name, f"tools[{number}].function.name"
        if tool.type != "function":
            param = f"tools[{number}].type"
            raise InvalidRequestError(f"{param} must be function, not `{tool.type}`", param)
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError(f"{param} must be 1 to 64 letters, digits, `_` or `-`, not `{name}`", param)
        if name in seen:
            raise InvalidRequestError(f"{param}: two tools have the name `{name}`", param)
        seen.add(name)


def _arguments(tool: Tool) -> Mapping[str, object]:
    return tool.function.parameters or _ANY_ARGUMENTS


def _definition(tool: Tool) -> Mapping[str, object]:
    function: dict[str, object] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = _arguments(tool)
    return {"type": "function", "function": function}
