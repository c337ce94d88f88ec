"""Rates count full batches only, and a step's time is told by file."""

import cProfile

import pytest

from benchmarks.decode_contenders import Prompts, full_batch_rate
from benchmarks.step_parts import OTHER, by_part, part_of, step_parts
from tests.support.fake_runner import FakeRunner


def test_a_rate_counts_the_time_in_which_all_sequences_run() -> None:
    """From the last one's first token to the first one's last: 2 + 2 tokens in a second."""
    assert full_batch_rate([[0.0, 1.0, 1.5, 2.0], [1.0, 1.4, 1.9, 2.6, 3.0]]) == pytest.approx(4.0)


def test_sequences_that_never_ran_together_have_no_rate() -> None:
    """The second one began when the first had ended."""
    with pytest.raises(ValueError, match="never ran all together"):
        full_batch_rate([[0.0, 1.0], [1.0, 2.0]])


def test_prompts_differ_and_are_the_same_in_every_run() -> None:
    """A repeated prompt would be found in the prefix cache."""
    prompts = Prompts(1000)
    first, second = prompts.make(64), prompts.make(64)
    assert first != second
    assert first == Prompts(1000).make(64)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/x/twostroke/engine/cpu_model/products.py", "matrix products"),
        ("/x/twostroke/engine/cpu_model/row_products.py", "matrix products"),
        ("/x/twostroke/engine/cpu_model/forward.py", "norms, rotation, activation"),
        ("/x/twostroke/engine/attention/cpu.py", "attention"),
        ("/x/twostroke/engine/scheduler.py", "scheduling, accounts, outputs"),
        ("/x/site-packages/torch/nn/modules/module.py", "model library"),
        ("/x/benchmarks/step_parts.py", OTHER),
    ],
)
def test_files_belong_to_parts(path: str, part: str) -> None:
    """The first piece that fits decides."""
    assert part_of(path) == part


def test_built_in_functions_count_for_their_callers() -> None:
    """All time of the profile is told, and this file's has that of `sum`."""
    profile = cProfile.Profile()
    profile.enable()
    total = sum(range(200_000))
    profile.disable()
    assert total
    seconds = by_part(profile.getstats())
    assert set(seconds) <= {OTHER}


def test_a_step_is_split_into_parts() -> None:
    """An instant model: the engine's own work is there, and no part is negative."""
    parts = step_parts(FakeRunner(), [[1, 2, 3], [4, 5, 6]], steps=3)
    assert parts["scheduling, accounts, outputs"] > 0
    assert min(parts.values()) >= 0
