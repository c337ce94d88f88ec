"""From the fields of an OpenAI request to sampling parameters; every refusal is an error that names its field."""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from twostroke.executor.base import ServedModel
from twostroke.frontend.request_fields import check_token_ids, seed_of
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import SamplingFields
from twostroke.protocol.sampling import MAX_LOGPROBS, SamplingParams

MAX_BAD_WORD_TEXTS = 128
MAX_BAD_WORD_CHARS = 128

N = TypeVar("N", int, float)

_TOKEN_ID = re.compile(r"[0-9]{1,9}")


class WantedLogprobs(msgspec.Struct, frozen=True):
    """Alternatives to report at each token; None for no logprobs.

    Attributes:
        output: Of the output.
        echo: Of the echoed prompt.
        prompt: Of the prompt, apart from any echo.
    """

    output: int | None = None
    echo: int | None = None
    prompt: int | None = None

    @property
    def of_prompt(self) -> int | None:
        """What the engine is asked for: enough for both."""
        asked = [count for count in (self.echo, self.prompt) if count is not None]
        return max(asked, default=None)


NO_LOGPROBS = WantedLogprobs()


def check_prompt_logprobs(body: SamplingFields) -> None:
    """Refuse `prompt_logprobs` where they cannot be told.

    Raises:
        InvalidRequestError: They are asked for in a stream, or too many of them.
    """
    count = body.prompt_logprobs
    if count is None:
        return
    if body.stream:
        raise InvalidRequestError("prompt_logprobs do not go with a stream; leave one of both out", "prompt_logprobs")
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequestError(f"prompt_logprobs must be from 0 to {MAX_LOGPROBS}, not {count}", "prompt_logprobs")


def read_sampling(
    body: SamplingFields, wanted: WantedLogprobs, model: ServedModel, text: TextModel, max_tokens: int
) -> SamplingParams:
    """How tokens are chosen, for a prompt that leaves room for `max_tokens`.

    Raises:
        InvalidRequestError: A value is outside its range.
    """
    defaults = text.defaults
    stop_token_ids = body.stop_token_ids or []
    if stop_token_ids:
        check_token_ids(stop_token_ids, model, "stop_token_ids")
    top_k = _given(body.top_k, defaults.top_k)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=_given(body.temperature, defaults.temperature),
            # Both 0 and -1 say "all tokens" in common clients; more than the vocabulary says so too.
            top_k=0 if top_k == -1 else min(top_k, model.vocab_size),
            top_p=_given(body.top_p, defaults.top_p),
            min_p=_given(body.min_p, defaults.min_p),
            seed=seed_of(body),
            repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body.logit_bias, model) if body.logit_bias else (),
            bad_words=_bad_words(body.bad_words, text) if body.bad_words else (),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=bool(body.ignore_eos),
            logprobs=wanted.output,
            prompt_logprobs=wanted.of_prompt,
        )
    except ValueError as error:
        raise _refusal(error) from None


def with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """`params` for another prompt, that leaves so much room.

    Raises:
        InvalidRequestError: `min_tokens` is more.
    """
    try:
        return msgspec.structs.replace(params, max_tokens=max_tokens)
    except ValueError as error:
        raise _refusal(error) from None


def _given(value: N | None, default: N) -> N:
    return default if value is None else value


def _refusal(error: ValueError) -> InvalidRequestError:
    """The messages of `SamplingParams` start with the field's name."""
    message = str(error)
    return InvalidRequestError(message, message.partition(" ")[0])


def _logit_bias(given: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    for key in given:
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidRequestError(f"logit_bias: `{key}` is no token id; its keys are numbers as text", "logit_bias")
    biases = {int(key): bias for key, bias in given.items()}
    check_token_ids(list(biases), model, "logit_bias")
    return tuple(biases.items())


def _bad_words(given: Sequence[str], text: TextModel) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each text, as it is spelled at the start of a text and after a space."""
    if len(given) > MAX_BAD_WORD_TEXTS:
        message = f"bad_words must hold at most {MAX_BAD_WORD_TEXTS} texts, not {len(given)}"
        raise InvalidRequestError(message, "bad_words")
    words: dict[tuple[int, ...], None] = {}
    for word in given:
        bare = word.lstrip()
        if not 1 <= len(bare) <= MAX_BAD_WORD_CHARS:
            message = f"bad_words must hold texts of 1 to {MAX_BAD_WORD_CHARS} characters, not {len(bare)}"
            raise InvalidRequestError(message, "bad_words")
        for spelled in (bare, f" {bare}"):
            words[tuple(text.encode(spelled, add_special_tokens=False))] = None
    words.pop((), None)  # a normalizer may leave nothing of a text
    return tuple(words)
