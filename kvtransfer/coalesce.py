"""From block lists to runs of bytes: blocks that are neighbours on both sides travel as one operation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`length` blocks from block `source` on, to block `target` on."""

    source: int
    target: int
    length: int


def coalesce(positions: Sequence[int], leased: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """The fewest runs, in the order asked for, that copy leased block `positions[i]` to `targets[i]` for every i.

    Args:
        positions: Numbers within `leased`.
        leased: Block numbers of the source.
        targets: Block numbers of the target, as many as positions.
    """
    runs: list[Run] = []
    first_source = first_target = count = 0
    for position, target in zip(positions, targets, strict=True):
        source = leased[position]
        if source == first_source + count and target == first_target + count and count:
            count += 1
            continue
        if count:
            runs.append(Run(first_source, first_target, count))
        first_source, first_target, count = source, target, 1
    if count:
        runs.append(Run(first_source, first_target, count))
    return runs


def slices(runs: Sequence[Run], max_blocks: int) -> Iterator[Run]:
    """The same copies in runs of at most `max_blocks`, so that none occupies the transport for long."""
    for run in runs:
        if run.length <= max_blocks:
            yield run
            continue
        for start in range(0, run.length, max_blocks):
            yield Run(run.source + start, run.target + start, min(max_blocks, run.length - start))
