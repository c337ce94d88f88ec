"""What differs between the endpoints that generate text: how a body is read and how an answer is written."""

import functools
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from twostroke.frontend.intake import Submission
from twostroke.frontend.output import Piece
from twostroke.frontend.request_fields import StreamUsage
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.openai_answers import PromptLogprob, PromptLogprobsField, Usage


class AnswerWriter(Protocol):
    """Writes one request's answer, in pieces or as a whole."""

    def first(self, index: int) -> bytes:
        """The event before the first piece of choice `index`; b"" if there is none."""
        ...

    def piece(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The event of one piece of choice `index`, with the counts so far if there are any."""
        ...

    def around_text(self) -> tuple[bytes, bytes] | None:
        """What stands before and after the JSON text of choice 0 in the event of a piece that is text and no more.

        None if text does not go out as it comes: it may be a tool call.
        """
        ...

    def usage(self, usage: Usage) -> bytes:
        """The event of the token counts."""
        ...

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """The JSON body of an answer that is not streamed: all pieces of each choice in one."""
        ...


class Surface(Protocol):
    """One endpoint's schema."""

    @property
    def name(self) -> str:
        """Label in metrics and logs."""
        ...

    async def read(self, body: bytes, deadline_s: float) -> Submission:
        """Read and check a request body.

        Raises:
            InvalidRequestError: Something in it is wrong.
            ApiError: It asks for another model.
            OverloadedError: The model is still loading.
            EngineDeadError: It never became ready.
        """
        ...

    def writer(self, submission: Submission) -> AnswerWriter:
        """A writer for the answer to `submission`."""
        ...


def shown_ids(piece: Piece) -> list[int] | msgspec.UnsetType:
    """The `token_ids` of a choice: only there if the request asked for them."""
    return msgspec.UNSET if piece.token_ids is None else piece.token_ids


def shown_prompt_logprobs(piece: Piece, text: TextModel) -> PromptLogprobsField:
    """The `prompt_logprobs` of an answer: only there if the request asked for them."""
    if piece.prompt_logprobs is None:
        return msgspec.UNSET

    def shown(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob, rank, text.token_bytes(token_id).decode(errors="replace"))

    positions: list[dict[str, PromptLogprob] | None] = [None]
    for token in piece.prompt_logprobs:
        its = token.logprobs
        own = {str(token.token_id): shown(token.token_id, its.chosen, its.rank)}
        likeliest = enumerate(zip(its.top_ids, its.top, strict=True), 1)
        positions.append({str(token_id): shown(token_id, top, rank) for rank, (token_id, top) in likeliest} | own)
    return positions


class Envelope:
    """The parts of a chunk that are the same in all chunks of a stream, encoded once.

    A chunk is `data: {HEAD,"choices":[CHOICE],TAIL}`; the tail is `"usage": null` if the stream ends with counts.

    Args:
        id_prefix: `cmpl` or `chatcmpl`.
        kind: OpenAI's `object`.
        model: Served name.
        usage: When the stream carries counts.
    """

    def __init__(self, id_prefix: str, kind: str, model: str, usage: StreamUsage) -> None:
        self.id = f"{id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self._kind = kind
        self._tail = b"]}\n\n" if usage is StreamUsage.NEVER else b'],"usage":null}\n\n'

    @functools.cached_property
    def _head(self) -> bytes:
        """Made with the first chunk: a whole answer has none."""
        fields = {"id": self.id, "object": self._kind, "created": self.created, "model": self.model}
        return b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['

    def chunk(self, choice: bytes, usage: Usage | None = None) -> bytes:
        """The event that carries one encoded choice, and perhaps the counts so far."""
        return self._head + choice + (self._tail if usage is None else _counts(usage))

    def around_text(self, choice: bytes) -> tuple[bytes, bytes]:
        """What stands around the text of each chunk that carries nothing else, given one encoded choice without any."""
        before, after = choice.split(b'""')
        return self._head + before, after + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The event that carries the counts; it has no choice."""
        return self._head + _counts(usage)


def _counts(usage: Usage) -> bytes:
    return b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n"
