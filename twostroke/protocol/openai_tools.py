"""The part of the OpenAI schema about structured output and tools.

`guided_*` and `structured_outputs` are vLLM's extra body fields.
"""

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct):
    """A named JSON schema. It always holds, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """What the output must be: `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's newer form of the `guided_*` fields: one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(msgspec.Struct):
    """A function that the model may call.

    Attributes:
        name: Letters, digits, `_` and `-`, 64 at most.
        description: What it does, for the model.
        parameters: JSON schema of its arguments.
        strict: Ignored: forced calls always follow the schema, others are the model's own.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool; only those of type `function` are served."""

    type: str
    function: Function


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct):
    """The one tool that must be called."""

    type: str
    function: NamedFunction


class FunctionCall(msgspec.Struct):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that a model made."""

    id: str
    type: str
    function: FunctionCall


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The name in a call's first delta, and in each a piece of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the call number `index`; the first one has its id."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None
