"""The grammar of an answer that must call tools, in the syntax of the model's family."""

import json
from collections.abc import Mapping

from twostroke.frontend.tools import hermes, llama_json
from twostroke.protocol.config import ToolFamily
from twostroke.protocol.grammar import JSON_OPTIONS

Schema = Mapping[str, object]


def calls_grammar(family: ToolFamily, tools: Mapping[str, Schema], *, several: bool) -> str:
    """A Lark grammar of one call, or of one and more.

    Args:
        family: The syntax.
        tools: The schema of each tool's arguments, by name; at least one.
        several: Whether more than one call may follow each other.
    """
    bodies = [_body(family, name, schema) for name, schema in tools.items()]
    if family is ToolFamily.HERMES:
        call, between = f'{json.dumps(hermes.OPENING)} "\\n" tool "\\n" {json.dumps(hermes.CLOSING)}', '"\\n"'
    else:
        call, between = "tool", json.dumps(f"{llama_json.SEPARATOR} ")
    start = f"call ({between} call)*" if several else "call"
    names = [f"tool_{number}" for number in range(len(bodies))]
    rules = [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join([f"start: {start}", f"call: {call}", f"tool: {' | '.join(names)}", *rules])


def answer_or_calls_grammar(family: ToolFamily, tools: Mapping[str, Schema], answer: Schema, *, several: bool) -> str:
    """Likewise, of an answer that is either calls or JSON that is valid under a schema."""
    calls = calls_grammar(family, tools, several=several).replace("start:", "calls:", 1)
    return f"start: answer | calls\nanswer: {_json(answer)}\n{calls}"


def _body(family: ToolFamily, name: str, schema: Schema) -> str:
    key = "parameters" if family is ToolFamily.LLAMA_JSON else "arguments"
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{json.dumps(head)} {_json(schema)} "}}"'


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"
