"""Finds stop strings in text that arrives in pieces.

Text that could be the beginning of a stop string is held back until the next piece decides. Of several stop strings the
one that ends first counts; of those that end at the same place, the longest. So the result does not depend on how the
text was cut into pieces.
"""


class StopStrings:
    """Watches one sequence's text.

    Args:
        stops: Texts that end the sequence; none of them empty.
        include: The stop string that was found is part of the text.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            The text that is certain to be before any stop string, and whether one was found. After that the sequence
            has ended; what follows the stop string is dropped, and unless it is included, it itself.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        found = self._find(text)
        if found is not None:
            self._held = ""
            start, end = found
            return text[: end if self._include else start], True
        certain = len(text) - self._possible_start(text)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """The text held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Where the stop string that ends first starts and ends."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
