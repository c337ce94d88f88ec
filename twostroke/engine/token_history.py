"""Which tokens a sequence holds, for penalties; kept token by token, and rebuilt from its ids wherever it runs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.protocol.sampling import SamplingParams

_FIRST_CAPACITY = 64


class TokenHistory:
    """The distinct tokens of a sequence, each with the number of times that the output holds it.

    Args:
        prompt_ids: Tokens that count as seen, but not as output.
        output_ids: The output so far.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, np.int64))
        capacity = len(distinct) + _FIRST_CAPACITY
        self._ids: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(capacity, np.float32)
        self._ids[: len(distinct)] = distinct
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        for token_id in output_ids:
            self.add(token_id)

    @classmethod
    def wanted(cls, sampling: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> "TokenHistory":
        """The history that the penalties of `sampling` read: the prompt only matters for repetition."""
        return cls(prompt_ids if sampling.repetition_penalty != 1.0 else (), output_ids)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens; a view that `add` changes."""
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often the output holds each of them; a view that `add` changes."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """The output got another token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        self._counts[place] += 1
