"""From the messages of a request to the conversation that a chat template renders."""

from twostroke.frontend.chat_template import Conversation, Message
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import ChatBody, ChatMessage, ContentPart, TokenizeBody

TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template gets from elsewhere than `chat_template_kwargs`."""


class Conversations:
    """Makes conversations of requests.

    Args:
        allow_templates: Requests may bring a chat template of their own.
    """

    def __init__(self, *, allow_templates: bool) -> None:
        self._allow_templates = allow_templates

    def of(self, messages: list[ChatMessage], fields: ChatBody | TokenizeBody) -> Conversation:
        """The conversation of a request.

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
        return Conversation(
            messages=[_message(message, f"messages[{number}]") for number, message in enumerate(messages)],
            add_generation_prompt=not to_continue
            if fields.add_generation_prompt is None
            else fields.add_generation_prompt,
            continue_final_message=to_continue,
            documents=fields.documents,
            variables=variables,
            template=fields.chat_template,
        )


def _message(message: ChatMessage, param: str) -> Message:
    if message.tool_calls:
        raise InvalidRequestError(f"{param}.tool_calls: tools are not supported yet", f"{param}.tool_calls")
    content = message.content
    if isinstance(content, list):
        # Templates of text models expect one string.
        content = "\n".join(_text_of(part, f"{param}.content[{number}]") for number, part in enumerate(content))
    plain: dict[str, object] = {"role": message.role, "content": content if content is not None else ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text_of(part: ContentPart, param: str) -> str:
    if part.type != "text" or part.text is None:
        message = f"{param}: only parts of type `text` with a text are supported, not `{part.type}`"
        raise InvalidRequestError(message, param)
    return part.text
