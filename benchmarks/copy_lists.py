"""Which block goes where, in a benchmark of copies."""

import enum
import random


class Pattern(enum.StrEnum):
    """How the blocks of one transfer lie in the two caches."""

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"


def block_lists(pattern: Pattern, count: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Block numbers of source and target for a copy of all `count` blocks.

    Scattered: in a random order on both sides. Contiguous: block i to block i, in order.
    """
    sources, targets = list(range(count)), list(range(count))
    if pattern is Pattern.SCATTERED:
        draw.shuffle(sources)
        draw.shuffle(targets)
    return sources, targets
