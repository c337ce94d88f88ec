"""The output of one sequence as a client gets it: text up to a stop string, logprobs, counts, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.frontend.stop_strings import StopStrings
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InternalRequestError
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.tokens import unpack_tokens


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its logprobs.

    Attributes:
        token_id: The chosen token.
        logprobs: Its logprob and the likeliest alternatives.
        offset: Characters of output text that were certain before it.
    """

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """What some outputs add to the answer.

    Attributes:
        text: New text.
        tokens: The tokens that arrived since the piece before, if logprobs were asked for.
        finish_reason: Set in the last piece.
        token_ids: Ids of the tokens that arrived since the piece before; None if they were not asked for.
    """

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell a client yet."""
        return not self.text and self.finish_reason is None

    def append(self, piece: "Piece") -> None:
        """Add what comes after this piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason
        if piece.token_ids is not None:
            self.token_ids = [*(self.token_ids or []), *piece.token_ids]


class OutputText:
    """Turns the outputs of one sequence into pieces.

    Tokens whose text is held back (half a character, perhaps a stop string) make an empty piece; their logprobs come
    with the next piece that has text.

    Args:
        text: Decodes.
        stop: Stop strings; the output ends before the first one.
        min_tokens: Stop strings within the first so many tokens do not count.
        keep_ids: Pieces carry the token ids too.
    """

    def __init__(self, text: TextModel, stop: tuple[str, ...], min_tokens: int, *, keep_ids: bool = False) -> None:
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(stop)
        self._step = 1 if stop else None
        self._min_tokens = min_tokens
        self._scored: list[ScoredToken] = []
        self._ids: list[int] | None = [] if keep_ids else None
        self._length = 0
        self.token_count = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stopped_by_string = False

    def add(self, outputs: Sequence[SequenceOutput]) -> Piece:
        """The piece that `outputs` make together; outputs after a stop string are ignored.

        Raises:
            InternalRequestError: The sequence ended in a hand-over, which only a router may see.
        """
        text = "".join([self._add(output) for output in outputs if self.finish_reason is None])
        self._length += len(text)
        if not text and self.finish_reason is None:
            return Piece()
        piece = Piece(text, self._scored, self.finish_reason, self._ids)
        self._scored = []
        self._ids = None if self._ids is None else []
        return piece

    def _add(self, output: SequenceOutput) -> str:
        if output.finish_reason is FinishReason.HANDOVER:
            raise InternalRequestError(f"sequence {output.key} was handed over, but nobody takes it on")
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        token_ids = unpack_tokens(output.token_ids)
        text = self._decode(token_ids, output)
        if self.finish_reason is None and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._finish()
        return text

    def _decode(self, token_ids: list[int], output: SequenceOutput) -> str:
        """Decode up to a stop string: one token at a time, so that the count of tokens does not depend on batching."""
        silent_last = output.stop_token_id is not None and token_ids[-1:] == [output.stop_token_id]
        step = self._step or max(len(token_ids), 1)
        text = ""
        for start in range(0, len(token_ids), step):
            new = token_ids[start : start + step]
            self._score(new, start, output.logprobs, self._length + len(text))
            self.token_count += len(new)
            if self._ids is not None:
                self._ids += new
            # A stop token ends the output and is not part of it, whether it is a special token or not.
            audible = new[:-1] if silent_last and start + step >= len(token_ids) else new
            text += self._watch(self._detokenizer.push(audible))
            if self.finish_reason is not None:
                break
        return text

    def _watch(self, text: str) -> str:
        """`text` as far as it certainly comes before a stop string."""
        if self.token_count <= self._min_tokens:
            return text
        certain, found = self._stops.push(text)
        if found:
            self.finish_reason = FinishReason.STOP
            self.stopped_by_string = True
        return certain

    def _finish(self) -> str:
        """What was held back; the very last characters may still complete a stop string."""
        return self._watch(self._detokenizer.finish()) + ("" if self.stopped_by_string else self._stops.finish())

    def _score(self, token_ids: list[int], start: int, logprobs: tuple[TokenLogprobs, ...] | None, offset: int) -> None:
        if logprobs is not None:
            self._scored += [ScoredToken(token_id, logprobs[start + n], offset) for n, token_id in enumerate(token_ids)]
