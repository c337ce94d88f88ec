"""Pauses of our own: a stopped process or host hears nobody, which makes nobody else silent."""

import math

_USUAL_S = 0.3
"""A gap that says nothing: whoever looks does so more often, or about as often."""


class OwnPauses:
    """Tells of the time in which a thread or loop that looks again and again did not run.

    Args:
        silence_s: A peer unheard for so long is taken for dead; half of it between two looks is a pause, unless that is
            how often one looks in any case.
    """

    def __init__(self, silence_s: float) -> None:
        self._longest_s = max(silence_s / 2, _USUAL_S)
        self._looked = math.inf

    def look(self, now: float) -> float:
        """Seconds of the pause that has just ended; 0 if there was none."""
        gap_s, self._looked = now - self._looked, now
        return gap_s if gap_s > self._longest_s else 0.0
