"""How the next token is chosen. Crosses with the first message of a request only.

The order in which an engine applies the fields is fixed, so that every role and device agrees. It is vLLM's:

1. log-softmax of the raw logits gives the reported logprobs;
2. tokens that may not come now are forbidden: `bad_words` whose other tokens the output ends with, and, while the
   output is shorter than `min_tokens`, end-of-sequence and stop token ids;
3. `logit_bias` is added;
4. `repetition_penalty` divides the positive logits of tokens of prompt and output, and multiplies the negative ones;
5. `frequency_penalty` for each time that a token is in the output, and `presence_penalty` once, are subtracted;
6. `temperature` divides; 0 means greedy (the lowest id wins a tie) and skips the rest;
7. `min_p` forbids tokens that are less likely than this share of the likeliest one;
8. `top_k`, then `top_p` over what is left, forbid the tail;
9. Gumbel-max over random integers keyed by (`seed`, output index, token id) picks.

The output is all of it, tokens that other workers made (`generated_ids`) included: steps 2 to 9 do not know where a
token was made. If every token is forbidden, token 0 is chosen.
"""

from typing import Self

import msgspec

MAX_SEED = (1 << 63) - 1
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampling parameters.

    Attributes:
        max_tokens: Output length at most; None lets the engine use what the context length leaves.
        min_tokens: Until this many output tokens, tokens that would end the sequence are not chosen.
        temperature: 0 is greedy; at most 100.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities reach this; 1 keeps all.
        min_p: Keep the tokens that are at least this share as likely as the likeliest; 0 keeps all.
        seed: Keys the random numbers; a frontend draws one where the client gave none, so that a retry repeats it. It
            is that of index 0; see `for_index`.
        repetition_penalty: Above 1 makes tokens of prompt and output less likely, below 1 more likely.
        presence_penalty: Subtracted from the logits of tokens that the output holds.
        frequency_penalty: Subtracted from them for each time.
        logit_bias: Pairs of token id and what is added to its logit; each id once.
        bad_words: Token sequences that the output must not hold, each of at least one token.
        stop_token_ids: Tokens that end the sequence besides the model's end-of-sequence ids.
        ignore_eos: The model's end-of-sequence ids do not end the sequence.
        logprobs: None for none; k for the chosen token's logprob and the k likeliest alternatives (0 to 20).
        prompt_logprobs: Likewise for every token of the prompt but the first; such a prompt is computed whole.

    Raises:
        ValueError: A value is outside its range; the message starts with the field's name.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Runs for every request, more than once: what is plainly right is seen without making any text of it.
        max_tokens = self.max_tokens
        _require(max_tokens is None or max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({max_tokens}), not {self.min_tokens}")
        _require(0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, "from 0 to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all tokens)")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be from 0 to {MAX_SEED}, not {self.seed}")
        if self.penalized:
            _require_penalties(self)
        if self.stop_token_ids or self.logit_bias or self.bad_words:
            _require_lists(self)
        if self.logprobs is not None or self.prompt_logprobs is not None:
            _require_logprobs(self)

    def for_index(self, index: int) -> Self:
        """The parameters of sequence `index` of a request for several: only its seed differs, by the index.

        Index 0 has the given seed, so it makes the tokens that the request would make alone. The rule is vLLM's.
        """
        return msgspec.structs.replace(self, seed=(self.seed + index) & MAX_SEED) if index else self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require_penalties(params: SamplingParams) -> None:
    factor = params.repetition_penalty
    _require(0.01 <= factor <= 100.0, "repetition_penalty", factor, "from 0.01 to 100")  # noqa: PLR2004 - as it says
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        _require(-2.0 <= value <= 2.0, name, value, "from -2 to 2")  # noqa: PLR2004 - as it says


def _require_lists(params: SamplingParams) -> None:
    """Bounds of the fields that hold several values."""
    for name, values, most in (
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
        ("bad_words", params.bad_words, MAX_BAD_WORDS),
    ):
        _require(len(values) <= most, name, len(values), f"at most {most} entries long")
    _require(
        len({token_id for token_id, _ in params.logit_bias}) == len(params.logit_bias),
        "logit_bias",
        params.logit_bias,
        "a bias for each token id once",
    )
    for token_id, bias in params.logit_bias:
        _require(-100.0 <= bias <= 100.0, "logit_bias", f"{bias} (token id {token_id})", "from -100 to 100")  # noqa: PLR2004 - as it says
    for word in params.bad_words:
        _require(
            1 <= len(word) <= MAX_BAD_WORD_TOKENS,
            "bad_words",
            f"{len(word)} tokens",
            f"sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens",
        )


def _require_logprobs(params: SamplingParams) -> None:
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"from 0 to {MAX_LOGPROBS}")


def _require(ok: bool, field: str, value: object, range_text: str) -> None:  # noqa: FBT001 - a predicate
    if not ok:
        raise ValueError(f"{field} must be {range_text}, not {value}")
