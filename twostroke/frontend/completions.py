"""The schema of `POST /v1/completions`."""

import msgspec

from twostroke.executor.base import GenerationExecutor
from twostroke.frontend.intake import Intake, Prompt, Submission
from twostroke.frontend.output import Piece, ScoredToken
from twostroke.frontend.request_fields import OutputLimit, decode_body
from twostroke.frontend.surface import AnswerWriter, Envelope, shown_ids
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import Completion, CompletionBody, CompletionChoice, CompletionLogprobs, Usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""

_DECODER = msgspec.json.Decoder(CompletionBody)
_ENCODER = msgspec.json.Encoder()


class CompletionSurface:
    """Reads completion requests and writes their answers.

    Args:
        executor: Knows the model and draws client ids.
        text: Tokenizes and names tokens.
    """

    name = "completions"

    def __init__(self, executor: GenerationExecutor, text: TextModel) -> None:
        self._intake = Intake(executor, text.defaults)
        self._text = text

    async def read(self, body: bytes, deadline_s: float) -> Submission:
        """Read and check a request body; see `Surface`."""
        fields = decode_body(_DECODER, body)
        self._intake.check(fields)
        prompt = Prompt(await self._prompt_ids(fields.prompt), "prompt")
        limit = OutputLimit(fields.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS)
        return self._intake.submission(fields, prompt, limit, logprobs=fields.logprobs, deadline_s=deadline_s)

    def writer(self, submission: Submission) -> AnswerWriter:
        """A writer for the answer to `submission`."""
        return _Writer(self._text, submission.model, include_usage=submission.include_usage)

    async def _prompt_ids(self, given: str | list[str | int | list[int]]) -> list[int]:
        """The token ids of the one prompt that was given, in whatever form."""
        prompt = _single(given)
        return await self._text.encode_text(prompt) if isinstance(prompt, str) else prompt


def _single(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """The one prompt in any of OpenAI's four forms: text, [text], token ids, [token ids]."""
    if isinstance(prompt, str):
        return prompt
    token_ids = [item for item in prompt if isinstance(item, int)]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if not prompts:
        return token_ids
    if token_ids:
        raise InvalidRequestError("prompt must not mix token ids with texts or lists", "prompt")
    if len(prompts) != 1:
        message = f"prompt holds {len(prompts)} prompts; several in one request are not supported yet, send one each"
        raise InvalidRequestError(message, "prompt")
    return prompts[0]


class _Writer:
    """Writes one completion."""

    def __init__(self, text: TextModel, model: str, *, include_usage: bool) -> None:
        self._text = text
        self._envelope = Envelope("cmpl", "text_completion", model, include_usage=include_usage)

    def first(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        return self._envelope.chunk(_ENCODER.encode(self._choice(piece)))

    def usage(self, usage: Usage) -> bytes:
        return self._envelope.usage(usage)

    def whole(self, answer: Piece, usage: Usage) -> bytes:
        envelope = self._envelope
        choices = [self._choice(answer)]
        return _ENCODER.encode(
            Completion(envelope.id, "text_completion", envelope.created, envelope.model, choices, usage)
        )

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = self._logprobs(piece.tokens)
        return CompletionChoice(0, piece.text, logprobs, piece.finish_reason, shown_ids(piece))

    def _logprobs(self, tokens: list[ScoredToken]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        top = [dict(zip(map(self._spell, token.logprobs.top_ids), token.logprobs.top, strict=True)) for token in tokens]
        return CompletionLogprobs(
            tokens=[self._spell(token.token_id) for token in tokens],
            token_logprobs=[token.logprobs.chosen for token in tokens],
            top_logprobs=top,
            text_offset=[token.offset for token in tokens],
        )

    def _spell(self, token_id: int) -> str:
        r"""The token's text; one that holds part of a character is spelled as OpenAI does, `bytes:\xe2\x82`."""
        raw = self._text.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
