"""Token sequences that an output must not hold.

As in vLLM, only the output is looked at: a word that begins in the prompt may end in the output.
"""

from collections.abc import Iterable, Sequence


class BadWords:
    """Knows which tokens would complete a bad word.

    Args:
        words: The token sequences, none of them empty.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._single: set[int] = set()
        self._by_last_before: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) == 1:
                self._single.add(word[0])
            else:
                self._by_last_before.setdefault(word[-2], []).append(word)

    def completing(self, token_ids: Sequence[int], output_tokens: int) -> set[int]:
        """Tokens that would complete a bad word now.

        Args:
            token_ids: Prompt and output.
            output_tokens: How many of them, at the end, are output.
        """
        if not output_tokens:
            return self._single
        forbidden = set(self._single)
        for word in self._by_last_before.get(token_ids[-1], ()):
            before = len(word) - 1
            if before <= output_tokens and tuple(token_ids[-before:]) == word[:-1]:
                forbidden.add(word[-1])
        return forbidden
