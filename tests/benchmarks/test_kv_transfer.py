"""The benchmark of KV transfers copies what it says, and reads its peers right."""

import random
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import kv_transfer
from benchmarks.block_memory import BlockMemory
from benchmarks.copy_lists import Pattern, block_lists
from benchmarks.ucx_perftest import parse_bandwidth

PERFTEST_OUTPUT = """\
+--------------+--------------+------------------------------+---------------------+-----------------------+
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
                        8192      1.483   276.587   271.441      225.97     1000.00        3615        3684
"""


def test_scattered_blocks_are_all_blocks_in_another_order() -> None:
    """Both sides are permutations, and not each other's."""
    sources, targets = block_lists(Pattern.SCATTERED, 100, random.Random(1))
    assert sorted(sources) == sorted(targets) == list(range(100))
    assert sources != list(range(100))
    assert sources != targets
    assert block_lists(Pattern.CONTIGUOUS, 3, random.Random(1)) == ([0, 1, 2], [0, 1, 2])


def test_marks_show_what_was_not_copied() -> None:
    """A block counts as right only if both its ends hold the number of its source."""
    memory = BlockMemory(4 * 64)
    memory.number(64)
    assert memory.wrong([0, 1, 2, 3], [0, 1, 2, 3], 64) == 0
    assert memory.wrong([1, 1], [0, 1], 64) == 1
    memory.clear(64)
    assert memory.wrong([0, 1], [0, 1], 64) == 2


def test_the_bandwidth_of_perftest_is_the_whole_runs() -> None:
    """In GB of 10^9 bytes, from MiB."""
    assert parse_bandwidth(PERFTEST_OUTPUT) == pytest.approx(1.048576)
    with pytest.raises(RuntimeError, match="no result"):
        parse_bandwidth("connection refused")


def test_a_small_run_measures_the_package_and_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both contenders copy whole blocks over tcp; missing peers are named with what would install them."""
    sizes = mock.patch.object(kv_transfer, "SIZES", (64 << 10,))
    perftest = mock.patch.object(kv_transfer, "find_perftest", return_value=None)
    arguments = ["kv_transfer", "--rounds", "1", "--mib", "4", "--peers", str(tmp_path), "--out", str(tmp_path)]
    with sizes, perftest, mock.patch("sys.argv", arguments):
        kv_transfer.main()
    shown = capsys.readouterr().out
    assert "tcp, 64 KiB" in shown
    assert "nixl-cu12==1.5.1" in shown
    assert (tmp_path / "kv_transfer.json").exists()
