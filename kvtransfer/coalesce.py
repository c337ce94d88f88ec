"""From block lists to runs of bytes: blocks that are neighbours on both sides travel as one operation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks from block `source` on, to block `target` on."""

    source: int
    target: int
    count: int


def coalesce(positions: Sequence[int], leased: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """The fewest runs, in the order asked for, that copy leased block `positions[i]` to `targets[i]` for every i.

    Args:
        positions: Numbers within `leased`.
        leased: Block numbers of the source.
        targets: Block numbers of the target, as many as positions.
    """
    runs: list[Run] = []
    for position, target in zip(positions, targets, strict=True):
        source = leased[position]
        last = runs[-1] if runs else None
        if last and source == last.source + last.count and target == last.target + last.count:
            runs[-1] = Run(last.source, last.target, last.count + 1)
        else:
            runs.append(Run(source, target, 1))
    return runs


def slices(runs: Sequence[Run], max_blocks: int) -> Iterator[Run]:
    """The same copies in runs of at most `max_blocks`, so that none occupies the transport for long."""
    for run in runs:
        for start in range(0, run.count, max_blocks):
            yield Run(run.source + start, run.target + start, min(max_blocks, run.count - start))
