"""From the messages of a request to the conversation that a chat template renders."""

import json

from twostroke.frontend.chat_template import Conversation, Message
from twostroke.frontend.tools.families import family_of, renders_tools
from twostroke.frontend.tools.instructions import with_instructions
from twostroke.frontend.tools.use import ToolUse, read_tools
from twostroke.protocol.config import ToolFamily
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import ChatBody, ChatMessage, ContentPart, TokenizeBody
from twostroke.protocol.openai_tools import ToolCall

TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template gets from elsewhere than `chat_template_kwargs`."""


class Conversations:
    """Makes conversations of requests.

    Args:
        allow_templates: Requests may bring a chat template of their own.
        template: The model's own chat template.
        tool_family: The syntax of the model's tool calls.
    """

    def __init__(self, *, allow_templates: bool, template: str = "", tool_family: ToolFamily = ToolFamily.AUTO) -> None:
        self._allow_templates = allow_templates
        self._template = template
        self._tool_family = tool_family

    def tools(self, fields: ChatBody | TokenizeBody) -> ToolUse | None:
        """How a request uses tools; None if it does not.

        Raises:
            InvalidRequestError: See `read_tools`.
        """
        family: ToolFamily | None = self._tool_family
        if family is ToolFamily.AUTO:
            family = family_of(fields.chat_template or self._template)
        return read_tools(fields, family)

    def of(
        self, messages: list[ChatMessage], fields: ChatBody | TokenizeBody, tools: ToolUse | None = None
    ) -> Conversation:
        """The conversation of a request.

        Args:
            messages: What was said.
            fields: The request.
            tools: What may be called.

        Raises:
            InvalidRequestError: There is no message, a message holds what is not served, or the options exclude each
                other or are not allowed here.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message, not 0", "messages")
        if fields.chat_template is not None and not self._allow_templates:
            message = "chat_template: this server renders with the model's own template only; leave it out"
            raise InvalidRequestError(message, "chat_template")
        to_continue = bool(fields.continue_final_message)
        if to_continue and fields.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other; set one of them"
            raise InvalidRequestError(message, "continue_final_message")
        variables = fields.chat_template_kwargs or {}
        taken = next((name for name in variables if name in TEMPLATE_INPUTS), None)
        if taken is not None:
            param = f"chat_template_kwargs.{taken}"
            raise InvalidRequestError(f"{param}: the template gets `{taken}` from the request itself", param)
        plain = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
        definitions = None if tools is None else tools.definitions()
        uses_tools = definitions or any("tool_calls" in message for message in plain)
        if uses_tools and not renders_tools(fields.chat_template or self._template):
            plain, definitions = with_instructions(plain, definitions or ()), None
        return Conversation(
            messages=plain,
            tools=definitions,
            add_generation_prompt=not to_continue
            if fields.add_generation_prompt is None
            else fields.add_generation_prompt,
            continue_final_message=to_continue,
            documents=fields.documents,
            variables=variables,
            template=fields.chat_template,
        )


def _message(message: ChatMessage, param: str) -> Message:
    content = message.content
    if content is None and message.role != "assistant":
        # An assistant's message may be calls alone; everybody else has something to say.
        raise InvalidRequestError(f"{param}.content must be given for role `{message.role}`", f"{param}.content")
    if isinstance(content, list):
        # Templates of text models expect one string.
        content = "\n".join(_text_of(part, f"{param}.content[{number}]") for number, part in enumerate(content))
    plain: dict[str, object] = {"role": message.role, "content": content if content is not None else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            _call(call, f"{param}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCall, param: str) -> dict[str, object]:
    """Templates write the arguments themselves, so they get an object and no text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        param = f"{param}.function.arguments"
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param) from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text_of(part: ContentPart, param: str) -> str:
    if part.type != "text" or part.text is None:
        message = f"{param}: only parts of type `text` with a text are supported, not `{part.type}`"
        raise InvalidRequestError(message, param)
    return part.text
