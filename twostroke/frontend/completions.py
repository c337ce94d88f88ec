"""The schema of `POST /v1/completions`."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

import msgspec

from twostroke.frontend.intake import Intake, Prompt, Submission
from twostroke.frontend.output import Piece, ScoredToken
from twostroke.frontend.request_fields import OutputLimit, StreamUsage, decode_body
from twostroke.frontend.sampling_fields import WantedLogprobs
from twostroke.frontend.structured_output import read_constraint
from twostroke.frontend.surface import AnswerWriter, Envelope, shown_ids, shown_prompt_logprobs
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import CompletionBody
from twostroke.protocol.openai_answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from twostroke.protocol.responses import TokenLogprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""
MAX_PROMPTS = 1024
"""Prompts in one request at most."""

_DECODER = msgspec.json.Decoder(CompletionBody)
_ENCODER = msgspec.json.Encoder()


class CompletionSurface:
    """Reads completion requests and writes their answers.

    Args:
        intake: Checks requests and makes submissions of them.
        text: Tokenizes and names tokens.
    """

    name = "completions"

    def __init__(self, intake: Intake, text: TextModel) -> None:
        self._intake = intake
        self._text = text

    async def read(self, body: bytes, deadline_s: float) -> Submission:
        """Read and check a request body; see `Surface`."""
        fields = decode_body(_DECODER, body)
        model = self._intake.check(fields)
        if fields.tools:
            raise InvalidRequestError("tools are for chats; use /v1/chat/completions", "tools")
        constraint = await read_constraint(fields)
        prompts = await self._prompts(fields.prompt)
        echo = bool(fields.echo)
        limit = OutputLimit(fields.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS, least=0 if echo else 1)
        wanted = WantedLogprobs(fields.logprobs, fields.logprobs if echo else None, fields.prompt_logprobs)
        return self._intake.submission(
            fields, model, prompts, limit, wanted=wanted, deadline_s=deadline_s, echo=echo, constraint=constraint
        )

    def writer(self, submission: Submission) -> AnswerWriter:
        """A writer for the answer to `submission`."""
        return _Writer(self._text, submission.model, submission.usage)

    async def _prompts(self, given: str | list[str | int | list[int]]) -> list[Prompt]:
        """The prompts in any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
        if isinstance(given, str):
            return [Prompt(await self._text.encode_text(given), "prompt", given)]
        if set(map(type, given)) <= {int}:  # the form with many entries
            return [Prompt(cast("list[int]", given), "prompt")]
        lists = [item for item in given if isinstance(item, list)]
        texts = [item for item in given if isinstance(item, str)]
        if len(given) not in (len(lists), len(texts)):
            message = "prompt must hold one kind: texts, lists of token ids, or token ids"
            raise InvalidRequestError(message, "prompt")
        if len(given) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, not {len(given)}", "prompt")
        encoded = await self._text.encode_texts(texts) if texts else lists
        numbered = enumerate(zip_longest(encoded, texts))
        return [Prompt(ids, f"prompt[{number}]", text) for number, (ids, text) in numbered]


class _Writer:
    """Writes the answer to one completion request."""

    def __init__(self, text: TextModel, model: str, usage: StreamUsage) -> None:
        self._text = text
        self._envelope = Envelope("cmpl", "text_completion", model, usage)

    def first(self, index: int) -> bytes:
        del index
        return b""

    def piece(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        return self._envelope.chunk(_ENCODER.encode(self._choice(index, piece)), usage)

    def around_text(self) -> tuple[bytes, bytes]:
        return self._envelope.around_text(_ENCODER.encode(self._choice(0, Piece())))

    def usage(self, usage: Usage) -> bytes:
        return self._envelope.usage(usage)

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        envelope = self._envelope
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return _ENCODER.encode(
            Completion(envelope.id, "text_completion", envelope.created, envelope.model, choices, usage)
        )

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            index,
            piece.text,
            self._logprobs(piece.tokens),
            piece.finish_reason,
            shown_ids(piece),
            shown_prompt_logprobs(piece, self._text),
        )

    def _logprobs(self, tokens: list[ScoredToken]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        return CompletionLogprobs(
            tokens=[self._spell(token.token_id) for token in tokens],
            token_logprobs=[token.logprobs.chosen if token.logprobs else None for token in tokens],
            top_logprobs=[self._top(token.logprobs) if token.logprobs else None for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        return dict(zip(map(self._spell, logprobs.top_ids), logprobs.top, strict=True))

    def _spell(self, token_id: int) -> str:
        r"""The token's text; one that holds part of a character is spelled as OpenAI does, `bytes:\xe2\x82`."""
        raw = self._text.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
