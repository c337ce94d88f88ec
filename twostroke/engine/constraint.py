"""One sequence's way through its grammar: which tokens may come next, and when it is finished.

    following --token that the grammar allows--> following, or finished if nothing can follow but the end
    following --end-of-sequence token, allowed where the grammar is satisfied--> finished
    following --any other token--> an error of the request

A constraint is a function of the grammar and the output so far: a worker that takes a sequence over, or resumes it,
starts at the beginning and replays `generated_ids`; a preempted sequence keeps its own.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from twostroke.protocol.errors import InvalidRequestError


class TokenConstraint:
    """Follows one output.

    Args:
        matcher: The compiled grammar, at some place in it; nobody else moves it.
        vocab_size: Size of the logits.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Self:
        """Another one at the same place, for another sequence; takes some 20 microseconds."""
        return type(self)(self._matcher.deep_copy(), self._vocab_size)

    @property
    def finished(self) -> bool:
        """Whether the output is complete and cannot go on."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocabulary]; of special tokens only those that end a sequence ever may.

        A grammar that turned out too complex to follow allows the end alone; `advance` then says so.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output got these tokens.

        Raises:
            InvalidRequestError: The grammar does not allow them, or is too complex to follow.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            # The library names the place in the grammar after the first line.
            reason = self._matcher.get_error().partition("\n")[0]
            raise InvalidRequestError(f"the output cannot follow its grammar any further: {reason}", "constraint")
