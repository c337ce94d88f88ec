"""The schema of `POST /v1/chat/completions`."""

from collections.abc import Sequence

import msgspec

from twostroke.frontend.conversation import Conversations
from twostroke.frontend.intake import Intake, Prompt, Submission
from twostroke.frontend.output import Piece, ScoredToken
from twostroke.frontend.request_fields import OutputLimit, decode_body
from twostroke.frontend.sampling_fields import WantedLogprobs
from twostroke.frontend.structured_output import read_constraint
from twostroke.frontend.surface import AnswerWriter, Envelope, shown_ids, shown_prompt_logprobs
from twostroke.frontend.tokenizer import TextModel
from twostroke.frontend.tools.answers import SpokenAnswers
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import ChatBody
from twostroke.protocol.openai_answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from twostroke.protocol.responses import TokenLogprobs
from twostroke.protocol.sampling import MAX_LOGPROBS

_DECODER = msgspec.json.Decoder(ChatBody)
_ENCODER = msgspec.json.Encoder()


class ChatSurface:
    """Reads chat requests and writes their answers.

    Args:
        intake: Checks requests and makes submissions of them.
        text: Renders, tokenizes and names tokens.
        conversations: Reads messages.
    """

    name = "chat"

    def __init__(self, intake: Intake, text: TextModel, conversations: Conversations) -> None:
        self._conversations = conversations
        self._intake = intake
        self._text = text

    async def read(self, body: bytes, deadline_s: float) -> Submission:
        """Read and check a request body; see `Surface`."""
        fields = decode_body(_DECODER, body)
        model = self._intake.check(fields)
        if fields.echo:
            raise InvalidRequestError("echo is not supported in chats; use /v1/completions", "echo")
        wanted = WantedLogprobs(_logprobs(fields), prompt=fields.prompt_logprobs)
        tools = self._conversations.tools(fields)
        conversation = self._conversations.of(fields.messages, fields, tools)
        constraint = await (read_constraint(fields) if tools is None else tools.constraint(fields))
        prompt = Prompt(await self._text.encode_chat(conversation), "messages")
        return self._intake.submission(
            fields,
            model,
            [prompt],
            _limit(fields),
            wanted=wanted,
            deadline_s=deadline_s,
            constraint=constraint,
            tools=tools,
        )

    def writer(self, submission: Submission) -> AnswerWriter:
        """A writer for the answer to `submission`."""
        return _Writer(self._text, submission)


def _limit(fields: ChatBody) -> OutputLimit:
    if fields.max_completion_tokens is not None:
        return OutputLimit(fields.max_completion_tokens, "max_completion_tokens", None)
    return OutputLimit(fields.max_tokens, "max_tokens", None)


def _logprobs(fields: ChatBody) -> int | None:
    """How many alternatives to report a token; None for no logprobs at all."""
    count = fields.top_logprobs or 0
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {count}", "top_logprobs")
    if fields.logprobs:
        return count
    if fields.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


class _Writer:
    """Writes the answer to one chat request."""

    def __init__(self, text: TextModel, submission: Submission) -> None:
        self._text = text
        self._spoken = SpokenAnswers(submission.tools)
        self._envelope = Envelope("chatcmpl", "chat.completion.chunk", submission.model, submission.usage)

    def first(self, index: int) -> bytes:
        choice = ChatChunkChoice(index, Delta(role="assistant", content=""))
        return self._envelope.chunk(_ENCODER.encode(choice))

    def piece(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        spoken = self._spoken.add(index, piece.text, piece.finish_reason)
        if spoken.empty and not piece.tokens and not piece.token_ids:
            return b""  # perhaps the beginning of a tool call
        delta = Delta(content=spoken.content or None, tool_calls=spoken.calls or None)
        choice = ChatChunkChoice(index, delta, self._logprobs(piece.tokens), spoken.finish_reason, shown_ids(piece))
        return self._envelope.chunk(_ENCODER.encode(choice), usage)

    def around_text(self) -> tuple[bytes, bytes] | None:
        if self._spoken.guarded:
            return None
        return self._envelope.around_text(_ENCODER.encode(ChatChunkChoice(0, Delta(content=""))))

    def usage(self, usage: Usage) -> bytes:
        return self._envelope.usage(usage)

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        envelope = self._envelope
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        prompt = shown_prompt_logprobs(answers[0], self._text)
        return _ENCODER.encode(
            ChatCompletion(envelope.id, "chat.completion", envelope.created, envelope.model, choices, usage, prompt)
        )

    def _choice(self, index: int, answer: Piece) -> ChatChoice:
        spoken = self._spoken.add(index, answer.text, answer.finish_reason)
        message = AssistantMessage("assistant", spoken.content)
        if spoken.calls:
            message.content = spoken.content or None
            message.tool_calls = spoken.whole_calls()
        return ChatChoice(index, message, self._logprobs(answer.tokens), spoken.finish_reason, shown_ids(answer))

    def _logprobs(self, tokens: list[ScoredToken]) -> ChatLogprobs | None:
        scored = [self._token(token.token_id, token.logprobs) for token in tokens if token.logprobs is not None]
        return ChatLogprobs(scored) if scored else None

    def _token(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        chosen = self._scored(token_id, logprobs.chosen)
        top = [self._scored(*pair) for pair in zip(logprobs.top_ids, logprobs.top, strict=True)]
        return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _scored(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._text.token_bytes(token_id)
        return TopLogprob(raw.decode(errors="replace"), logprob, list(raw))
