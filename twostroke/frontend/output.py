"""The output of one sequence as a client gets it: text up to a stop string, logprobs, counts, and why it ended."""

from collections.abc import Sequence

import msgspec

from twostroke.frontend.echo import CONTEXT_TOKENS, Echo
from twostroke.frontend.sampling_fields import NO_LOGPROBS, WantedLogprobs
from twostroke.frontend.stop_strings import StopStrings
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InternalRequestError
from twostroke.protocol.prompt_logprobs import PromptLogprobs, PromptTokenLogprobs
from twostroke.protocol.responses import FinishReason, SequenceOutput, TokenLogprobs
from twostroke.protocol.tokens import unpack_tokens


class ScoredToken(msgspec.Struct, frozen=True):
    """A token with its logprobs.

    Attributes:
        token_id: The chosen token, or one of an echoed prompt.
        logprobs: Its logprob and the likeliest alternatives; None for the first token of a prompt.
        offset: Characters of text that were certain before it.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


class ScoredPromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt, not the first, with its logprobs."""

    token_id: int
    logprobs: PromptTokenLogprobs


class Piece(msgspec.Struct):
    """What some outputs add to the answer.

    Attributes:
        text: New text.
        tokens: The tokens that arrived since the piece before, if logprobs were asked for.
        finish_reason: Set in the last piece.
        token_ids: Ids of the tokens that arrived since the piece before; None if they were not asked for.
        prompt_logprobs: In the first piece, if asked for.
    """

    text: str = ""
    tokens: list[ScoredToken] = []
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[ScoredPromptToken] | None = None

    def append(self, piece: "Piece") -> None:
        """Add what comes after this piece."""
        self.text += piece.text
        self.finish_reason = piece.finish_reason
        self.tokens += piece.tokens
        if self.token_ids is None:
            self.token_ids = piece.token_ids
        elif piece.token_ids is not None:
            self.token_ids += piece.token_ids
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


class OutputOptions(msgspec.Struct, frozen=True):
    """How outputs become text.

    Attributes:
        stop: Stop strings; the output ends before the first one.
        min_tokens: Stop strings within the first so many tokens do not count.
        include_stop: What ends the output, a stop string or a stop token, is part of it.
        keep_ids: Pieces carry the token ids too.
        logprobs: How many alternatives are shown where.
        prompt_ids: The prompt.
        echo: The text begins with the prompt.
        only_echo: And ends with it: what the engine makes is dropped.
    """

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    keep_ids: bool = False
    logprobs: WantedLogprobs = NO_LOGPROBS
    prompt_ids: Sequence[int] = ()
    echo: Echo | None = None
    only_echo: bool = False

    @property
    def only_text(self) -> bool:
        """Whether nothing looks at single tokens: then outputs that wait together are decoded together."""
        looks = self.stop or self.keep_ids or self.echo is not None or self.only_echo
        return not looks and self.logprobs == NO_LOGPROBS


class OutputText:
    """Turns the outputs of one sequence into pieces.

    Tokens whose text is held back (half a character, perhaps a stop string) make an empty piece; their logprobs come
    with the next piece that has text.

    Args:
        text: Decodes.
        options: How.

    Attributes:
        only_text: Text and counts are all that is asked for. Then `ShortWay` may decode and count in its place.
        detokenizer: Decodes.
        token_count: Tokens so far.
    """

    def __init__(self, text: TextModel, options: OutputOptions) -> None:
        self.detokenizer = text.detokenizer()
        self._options = options
        self._stops = StopStrings(options.stop, include=options.include_stop)
        self._scored: list[ScoredToken] = []
        self._ids: list[int] | None = [] if options.keep_ids else None
        self._prompt_logprobs: list[ScoredPromptToken] | None = None
        self._echo = options.echo
        self._echoed = 0  # characters of the prompt that the detokenizer still gives
        if options.echo is not None:
            self.detokenizer.push(list(options.prompt_ids[-CONTEXT_TOKENS:]))
            self._echoed = options.echo.held
        self.only_text = options.only_text
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
        if self.only_text and outputs and outputs[0].logprobs is None:
            text = self._add_plain(outputs)
            return Piece(text, finish_reason=self.finish_reason)
        text = "".join([self._add(output) for output in outputs if self.finish_reason is None])
        if not text and self.finish_reason is None:
            return Piece()
        piece = Piece(text, self._scored, self.finish_reason, self._ids, self._prompt_logprobs)
        self._scored = []
        self._prompt_logprobs = None
        self._ids = None if self._ids is None else []
        return piece

    def _add_plain(self, outputs: Sequence[SequenceOutput]) -> str:
        """The text of `outputs` where text and counts are all that is asked for."""
        first, last = outputs[0], outputs[-1]
        if self.finish_reason is not None:
            return ""
        if first.cached_tokens is not None:
            self.cached_tokens = first.cached_tokens
        token_ids = unpack_tokens(last.token_ids if first is last else b"".join([one.token_ids for one in outputs]))
        self.token_count += len(token_ids)
        if last.finish_reason is None:
            return self.detokenizer.push(token_ids)
        _refuse_handover(last)
        self.finish_reason = last.finish_reason
        if _ends_silently(last, token_ids, self._options):
            token_ids.pop()
        return self.detokenizer.push(token_ids) + self.detokenizer.finish()

    def _add(self, output: SequenceOutput) -> str:
        _refuse_handover(output)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        text = self._begin(output.prompt_logprobs)
        self._length += len(text)
        if self._options.only_echo:
            self.finish_reason = FinishReason.LENGTH
            return text
        text += self._decode(unpack_tokens(output.token_ids), output)
        if self.finish_reason is None and output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._finish()
        return text

    def _begin(self, prompt_logprobs: PromptLogprobs | None) -> str:
        """What comes before the first token: the echoed prompt, and its logprobs with it."""
        echo, self._echo = self._echo, None
        logprobs = [] if prompt_logprobs is None else prompt_logprobs.unpack()
        wanted = self._options.logprobs
        if prompt_logprobs is not None and wanted.prompt is not None:
            shown = (_cut(one, wanted.prompt) for one in logprobs)
            self._prompt_logprobs = list(map(ScoredPromptToken, self._options.prompt_ids[1:], shown))
        if echo is None:
            return ""
        if wanted.echo is not None:
            cut = (_cut(one, wanted.echo) for one in logprobs)
            scores = [None, *(TokenLogprobs(one.chosen, one.top_ids, one.top) for one in cut)]
            self._scored += map(ScoredToken, self._options.prompt_ids, scores, echo.offsets)
        return echo.text

    def _decode(self, token_ids: list[int], output: SequenceOutput) -> str:
        """Decode up to a stop string: one token at a time, so that the count of tokens does not depend on batching."""
        silent_last = _ends_silently(output, token_ids, self._options)
        step = 1 if self._options.stop or output.logprobs is not None else max(len(token_ids), 1)
        text = ""
        for start in range(0, len(token_ids), step):
            new = token_ids[start : start + step]
            self._score(new, start, output.logprobs)
            self.token_count += len(new)
            if self._ids is not None:
                self._ids += new
            audible = new[:-1] if silent_last and start + step >= len(token_ids) else new
            text += self._watch(self._unechoed(self.detokenizer.push(audible)))
            if self.finish_reason is not None:
                break
        return text

    def _unechoed(self, text: str) -> str:
        """`text` without the rest of an echoed prompt, which is out already."""
        if not self._echoed:
            return text
        rest, self._echoed = text[self._echoed :], max(0, self._echoed - len(text))
        return rest

    def _watch(self, text: str) -> str:
        """`text` as far as it certainly comes before the end."""
        if self.token_count > self._options.min_tokens:
            text, found = self._stops.push(text)
            if found:
                self.finish_reason = FinishReason.STOP
                self.stopped_by_string = True
        self._length += len(text)
        return text

    def _finish(self) -> str:
        """What was held back; the very last characters may still complete a stop string."""
        text = self._watch(self._unechoed(self.detokenizer.finish()))
        return text if self.stopped_by_string else text + self._stops.finish()

    def _score(self, token_ids: list[int], start: int, logprobs: tuple[TokenLogprobs, ...] | None) -> None:
        if logprobs is not None:
            self._scored += [
                ScoredToken(token_id, logprobs[start + n], self._length) for n, token_id in enumerate(token_ids)
            ]


def _refuse_handover(output: SequenceOutput) -> None:
    if output.finish_reason is FinishReason.HANDOVER:
        raise InternalRequestError(f"sequence {output.key} was handed over, but nobody takes it on")


def _ends_silently(output: SequenceOutput, token_ids: list[int], options: OutputOptions) -> bool:
    """Whether the last token is no part of the text: a stop token ends it, whether it is a special token or not."""
    if output.stop_token_id is None or options.include_stop:
        return False
    return token_ids[-1:] == [output.stop_token_id]


def _cut(logprobs: PromptTokenLogprobs, count: int) -> PromptTokenLogprobs:
    """The `count` likeliest: the engine was asked for enough for all who show some."""
    if len(logprobs.top_ids) <= count:
        return logprobs
    return PromptTokenLogprobs(logprobs.chosen, logprobs.rank, logprobs.top_ids[:count], logprobs.top[:count])
