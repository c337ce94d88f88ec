"""A model's chat template, rendered as `transformers` renders it, in a sandbox.

Templates come with the model, so they are untrusted code: jinja2's immutable sandbox runs them, and names that begin
with an underscore cannot be reached. The helpers that templates expect (`raise_exception`, `strftime_now`, `tojson`
without HTML escapes, loop controls, the `generation` block) behave as in `transformers.utils.chat_template_utils`.
"""

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from twostroke.protocol.errors import InvalidRequestError, ModelError

Message = Mapping[str, object]
"""One message as templates see it: `role`, `content`, and perhaps `name`."""

COMPILED_TEMPLATES = 32
"""Templates of requests that are kept compiled."""
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued, while it is rendered; `transformers` uses the same."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders.

    Attributes:
        messages: Oldest first, at least one.
        add_generation_prompt: The prompt ends with the head of the assistant's next message.
        continue_final_message: The prompt ends inside the last message, which the model continues.
        tools: What the model may call, as templates expect it.
        documents: For templates of models that answer from documents.
        variables: Further inputs of the template.
        template: Rendered instead of the model's own.
    """

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None

    @property
    def size(self) -> int:
        """About how many characters there are to render."""
        words = sum(len(str(message["content"])) for message in self.messages)
        return words + len(self.template or "") + len(str(self.tools or ""))


class ChatTemplate:
    """A model's template, and the means to render another one in its place.

    Args:
        source: Jinja source; None for a model without a template.
        special_tokens: `bos_token`, `eos_token`, ... as templates name them.

    Raises:
        ModelError: The source is no valid template.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._environment = _environment()
        try:
            self._own = None if source is None else self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._compile = functools.lru_cache(COMPILED_TEMPLATES)(self._environment.from_string)

    def render(self, conversation: Conversation) -> str:
        """The prompt of `conversation`.

        Raises:
            InvalidRequestError: There is no template, or it refuses the messages (its own words) or fails on them.
        """
        template = self._template(conversation.template)
        messages = list(conversation.messages)
        if conversation.continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{_CONTINUED}"}
        inputs = {
            **self._special_tokens,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            rendered = template.render(inputs)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", "messages") from error
        except Exception as error:  # templates are programs: what they do not expect surfaces as anything
            message = f"the chat template fails on the messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(message, "messages") from error
        return _up_to_continued(rendered) if conversation.continue_final_message else rendered

    def _template(self, given: str | None) -> jinja2.Template:
        if given is not None:
            try:
                return self._compile(given)
            except (jinja2.TemplateError, RecursionError) as error:
                message = f"chat_template is not valid: {error}"
                raise InvalidRequestError(message, "chat_template") from error
        if self._own is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        return self._own


def _up_to_continued(rendered: str) -> str:
    """The prompt up to the end of the message that is continued; where the template trims, without the space there."""
    end = rendered.rfind(_CONTINUED.strip())
    if end < 0:
        message = "the chat template drops the end of the last message, so that it cannot be continued"
        raise InvalidRequestError(message, "continue_final_message")
    whole = rendered.startswith(_CONTINUED, end)
    return rendered[:end] if whole else rendered[:end].rstrip()


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
