"""Runs of neighbouring blocks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.coalesce import Run, coalesce, slices

CASES = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.permutations(range(n)), st.permutations(range(n)), st.lists(st.integers(0, n - 1), unique=True)
    )
)


def copies(runs: list[Run]) -> list[tuple[int, int]]:
    """Every (source, target) that runs copy, in order."""
    return [(run.source + i, run.target + i) for run in runs for i in range(run.length)]


@given(CASES, st.integers(1, 5))
def test_runs_copy_exactly_what_was_asked_for(case: tuple[list[int], list[int], list[int]], max_blocks: int) -> None:
    """Whatever is coalesced and sliced: the same copies in the same order, and no two runs that could be one."""
    leased, targets, positions = case
    blocks = targets[: len(positions)]
    runs = coalesce(positions, leased, blocks)
    assert copies(runs) == [(leased[p], b) for p, b in zip(positions, blocks, strict=True)]
    for first, second in pairwise(runs):
        assert (second.source, second.target) != (first.source + first.length, first.target + first.length)
    sliced = list(slices(runs, max_blocks))
    assert copies(sliced) == copies(runs)
    assert all(run.length <= max_blocks for run in sliced)


def test_neighbours_on_one_side_only_stay_apart() -> None:
    """Both sides must run on for one operation."""
    assert coalesce([0, 1, 2], [5, 6, 7], [1, 2, 9]) == [Run(5, 1, 2), Run(7, 9, 1)]
