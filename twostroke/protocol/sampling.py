"""How the next token is chosen. Crosses with the first message of a request only.

The order in which an engine applies the fields is fixed, so that every role and device agrees:

1. log-softmax of the raw logits gives the reported logprobs;
2. `min_tokens` forbids end-of-sequence and stop token ids while the output is shorter;
3. `temperature` divides; 0 means greedy (the lowest id wins a tie) and skips the rest;
4. `top_k`, then `top_p` over what is left, forbid the tail;
5. Gumbel-max over random integers keyed by (`seed`, output index, token id) picks.
"""

import msgspec

MAX_SEED = (1 << 63) - 1
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's sampling parameters.

    Attributes:
        max_tokens: Output length at most; None lets the engine use what the context length leaves.
        min_tokens: Until this many output tokens, tokens that would end the sequence are not chosen.
        temperature: 0 is greedy; at most 100.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities reach this; 1 keeps all.
        seed: Keys the random numbers; a frontend draws one where the client gave none, so that a retry repeats it.
        stop_token_ids: Tokens that end the sequence besides the model's end-of-sequence ids.
        ignore_eos: The model's end-of-sequence ids do not end the sequence.
        logprobs: None for none; k for the chosen token's logprob and the k likeliest alternatives (0 to 20).

    Raises:
        ValueError: A value is outside its range; the message starts with the field's name.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _require(0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, "from 0 to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all tokens)")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED}")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            len(self.stop_token_ids),
            f"at most {MAX_STOP_TOKEN_IDS} ids long",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"from 0 to {MAX_LOGPROBS}",
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0


def _require(ok: bool, field: str, value: object, range_text: str) -> None:  # noqa: FBT001 - a predicate
    if not ok:
        raise ValueError(f"{field} must be {range_text}, not {value}")
