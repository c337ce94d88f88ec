"""`POST /tokenize` and `POST /detokenize`, with vLLM's schema: what the model's tokenizer makes of a text, and back."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from twostroke.executor.base import GenerationExecutor
from twostroke.frontend.conversation import Conversations
from twostroke.frontend.errors import ClientLeftError
from twostroke.frontend.exchange import Exchange
from twostroke.frontend.in_flight import InFlight
from twostroke.frontend.intake import served_model
from twostroke.frontend.request_fields import check_model, check_token_ids, decode_body
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import DetokenizeBody, TokenizeBody
from twostroke.protocol.openai_answers import Detokenized, Tokenized

Answer = Callable[[bytes], Awaitable[msgspec.Struct]]
"""From a request's body to its answer."""

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class Tokenizing:
    """Answers both endpoints.

    Args:
        executor: Knows the model.
        text: Renders and tokenizes.
        conversations: Reads messages.
    """

    def __init__(self, executor: GenerationExecutor, text: TextModel, conversations: Conversations) -> None:
        self._executor = executor
        self._text = text
        self._conversations = conversations

    async def tokenize(self, body: bytes) -> Tokenized:
        """The tokens of a prompt or of a rendered conversation.

        Raises:
            InvalidRequestError: Something in the body is wrong.
        """
        fields = decode_body(_TOKENIZE, body)
        model = served_model(self._executor)
        check_model(fields.model, model)
        tokens = await self._encode(fields)
        names = [self._text.token(token) or "" for token in tokens] if fields.return_token_strs else None
        return Tokenized(len(tokens), model.max_model_len, tokens, names)

    async def detokenize(self, body: bytes) -> Detokenized:
        """The text of tokens.

        Raises:
            InvalidRequestError: Something in the body is wrong.
        """
        fields = decode_body(_DETOKENIZE, body)
        model = served_model(self._executor)
        check_model(fields.model, model)
        check_token_ids(fields.tokens, model, "tokens")
        return Detokenized(await self._text.decode_text(fields.tokens))

    async def _encode(self, fields: TokenizeBody) -> list[int]:
        if fields.prompt is not None and fields.messages is not None:
            raise InvalidRequestError("prompt and messages exclude each other; send one of them", "prompt")
        if fields.prompt is not None:
            add = True if fields.add_special_tokens is None else fields.add_special_tokens
            return await self._text.encode_text(fields.prompt, add_special_tokens=add)
        if fields.messages is None:
            raise InvalidRequestError("prompt: missing; send a prompt or messages", "prompt")
        conversation = self._conversations.of(fields.messages, fields, self._conversations.tools(fields))
        return await self._text.encode_chat(conversation, add_special_tokens=bool(fields.add_special_tokens))


class AnswerEndpoint:
    """Serves an endpoint whose answer comes from the body alone; an ASGI application.

    Args:
        answer: Makes the answer.
        in_flight: Bounds the requests.
        body_bytes: Longer bodies get 413.
    """

    def __init__(self, answer: Answer, in_flight: InFlight, body_bytes: int) -> None:
        self._answer = answer
        self._in_flight = in_flight
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every failure becomes its answer."""
        exchange = Exchange(scope, receive, send)
        try:
            with self._in_flight.slot():
                answer = await self._answer(await exchange.body(self._body_bytes))
            await exchange.json(msgspec.json.encode(answer))
        except ClientLeftError:
            return
        except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, the client gets one answer
            await exchange.fail(error)
