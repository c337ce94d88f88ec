"""From the fields of a request to the constraint on its output; wrong ones are refused before anything runs."""

import asyncio
import json
import operator
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import any_to_lark

from twostroke.protocol.constraint import Constraint, ConstraintKind
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.grammar import grammar_error
from twostroke.protocol.openai import SamplingFields
from twostroke.protocol.openai_tools import ResponseFormat, StructuredOutputs

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
MAX_CHOICES = 4096
OFFLOAD_CHARS = 2048
"""Longer constraints take more than some milliseconds to check, and are checked in a thread."""

_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NONE = (None,) * len(_FIELDS)
_constraints_of = operator.attrgetter(*_FIELDS)


async def read_constraint(fields: SamplingFields) -> Constraint | None:
    """What the output must look like; None for anything.

    Raises:
        InvalidRequestError: More than one field asks for something, or one is wrong; `param` names it.
    """
    if _constraints_of(fields) == _NONE:  # nearly every request; looking closer costs more
        return None
    asked = list(_asked(fields))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _ in asked)
        raise InvalidRequestError(f"{names} exclude each other; leave all but one out", asked[1][0])
    param, constraint = asked[0]
    return await checked(constraint, param)


async def checked(constraint: Constraint, param: str) -> Constraint:
    """`constraint`, if its grammar is right.

    Raises:
        InvalidRequestError: It is not; the message is the grammar library's.
    """
    if len(constraint.text) <= OFFLOAD_CHARS:
        error = grammar_error(constraint)
    else:
        error = await asyncio.to_thread(grammar_error, constraint)
    if error is not None:
        raise InvalidRequestError(f"{param}: {error}", param)
    return constraint


def build(kind: ConstraintKind, text: str, param: str) -> Constraint:
    """A constraint.

    Raises:
        InvalidRequestError: The text is empty or too long.
    """
    try:
        return Constraint(kind, text)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: {error}", param) from None


def _asked(fields: SamplingFields) -> Iterator[tuple[str, Constraint]]:
    """The constraints that a request's fields ask for, with the fields' names."""
    outputs = fields.structured_outputs or StructuredOutputs()
    response_format = fields.response_format
    if response_format is not None and response_format.type != "text":
        yield "response_format", _json_schema(_format_schema(response_format), "response_format")
    for param, schema in (
        ("guided_json", fields.guided_json),
        ("structured_outputs.json", outputs.json),
        ("structured_outputs.json_object", {**ANY_OBJECT} if outputs.json_object else None),
    ):
        if schema is not None:
            yield param, _json_schema(schema, param)
    for param, regex in (
        ("guided_regex", fields.guided_regex),
        ("structured_outputs.regex", outputs.regex),
    ):
        if regex is not None:
            yield param, build(ConstraintKind.REGEX, regex, param)
    for param, choice in (
        ("guided_choice", fields.guided_choice),
        ("structured_outputs.choice", outputs.choice),
    ):
        if choice is not None:
            yield param, _choice(choice, param)
    for param, grammar in (
        ("guided_grammar", fields.guided_grammar),
        ("structured_outputs.grammar", outputs.grammar),
    ):
        if grammar is not None:
            yield param, _grammar(grammar, param)


def _format_schema(response_format: ResponseFormat) -> Mapping[str, object]:
    if response_format.type == "json_object":
        return ANY_OBJECT
    if response_format.type != "json_schema":
        message = f"response_format.type must be text, json_object or json_schema, not `{response_format.type}`"
        raise InvalidRequestError(message, "response_format.type")
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        message = "response_format.json_schema.schema is missing: type json_schema needs it"
        raise InvalidRequestError(message, "response_format.json_schema")
    return response_format.json_schema.schema


def _json_schema(schema: Mapping[str, object] | str, param: str) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param) from None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{param} must be a JSON schema, which is an object", param)
    return build(ConstraintKind.JSON_SCHEMA, json.dumps(schema), param)


def _choice(choice: list[str], param: str) -> Constraint:
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise InvalidRequestError(f"{param} must hold 1 to {MAX_CHOICES} texts, not {len(choice)}", param)
    if not all(choice):
        raise InvalidRequestError(f"{param} must hold no empty text", param)
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
    return build(ConstraintKind.LARK, f"start: {texts}", param)


def _grammar(grammar: str, param: str) -> Constraint:
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 - the converter raises errors of several kinds on what it does not expect
        raise InvalidRequestError(f"{param} is no GBNF grammar: {error}", param) from None
    return build(ConstraintKind.LARK, lark, param)
