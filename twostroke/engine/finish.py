"""When a sequence ends, and which tokens may not end it yet.

A token ends its sequence, by the first rule that applies:

1. the model's end-of-sequence ids, unless `ignore_eos`, and `stop_token_ids` end it with `STOP`;
2. the output is complete by its grammar, and cannot go on: `STOP`;
3. the output has `max_tokens` tokens (those made by other workers included): `LENGTH`;
4. prompt and output fill `max_model_len`: `LENGTH`.

While the output is shorter than `min_tokens`, the ids of rule 1 are forbidden. The token that ends a sequence is part
of its output. Stop *strings* are the frontend's business: it sees text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended well; `stop_token_id` is the end-of-sequence or stop token that did it, if one did."""

    reason: FinishReason
    stop_token_id: int | None = None


class FinishRules:
    """The rules for one sequence.

    Args:
        sampling: The request's parameters.
        eos_token_ids: The model's end-of-sequence ids.
        max_tokens: Output tokens at most, deduced where the request does not say.
        max_model_len: Prompt and output tokens at most.
    """

    def __init__(
        self, sampling: SamplingParams, eos_token_ids: Iterable[int], max_tokens: int, max_model_len: int
    ) -> None:
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.min_tokens = sampling.min_tokens
        eos = () if sampling.ignore_eos else eos_token_ids
        self._ending_ids = frozenset(eos) | frozenset(sampling.stop_token_ids)
        self._sorted_ending_ids = tuple(sorted(self._ending_ids))

    def forbidden_ids(self, output_index: int) -> tuple[int, ...]:
        """Ids that must not be chosen as output token number `output_index` (from 0), sorted."""
        return self._sorted_ending_ids if output_index < self.min_tokens else ()

    def finish(self, token_id: int, output_tokens: int, total_tokens: int, *, complete: bool = False) -> Finish | None:
        """Whether `token_id` ends the sequence.

        Args:
            token_id: The newest token.
            output_tokens: Length of the whole output, this token included.
            total_tokens: Length of prompt and output.
            complete: The output's grammar allows nothing more.
        """
        if token_id in self._ending_ids:
            return Finish(FinishReason.STOP, token_id)
        if complete:
            return Finish(FinishReason.STOP)
        if output_tokens >= self.max_tokens or total_tokens >= self.max_model_len:
            return Finish(FinishReason.LENGTH)
        return None
