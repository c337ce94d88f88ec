"""A model's chat template, rendered as `transformers` renders it, in a sandbox.

Templates come with the model, so they are untrusted code: jinja2's immutable sandbox runs them, and names that begin
with an underscore cannot be reached. The helpers that templates expect (`raise_exception`, `strftime_now`, `tojson`
without HTML escapes, loop controls, the `generation` block) behave as in `transformers.utils.chat_template_utils`.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from twostroke.protocol.errors import InvalidRequestError, ModelError

Message = Mapping[str, object]
"""One message as templates see it: `role`, `content`, and perhaps `name`."""


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token`, ... as templates name them.

    Raises:
        ModelError: The source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next message.

        Raises:
            InvalidRequestError: The template refuses the messages (its own words), or fails on them.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {error}", "messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Templates are programs: an unexpected shape of messages surfaces as any of these.
            message = f"the model's chat template fails on the messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(message, "messages") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; when rendering, it is its contents."""

    tags = frozenset({"generation"})  # type: ignore[assignment] # jinja annotates a mutable set

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node | list[nodes.Node]:
        """The block's statements themselves."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().astimezone().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by name or position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - likewise
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
