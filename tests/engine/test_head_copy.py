"""The face of the head copies: what it moves on a CPU, and what it refuses."""

import pytest
import torch

from twostroke.engine.head_copy import gather_heads, scatter_heads


def test_there_and_back() -> None:
    """Heads 1 and 2 of blocks 3 and 0 land in the buffer in that order, and return to other blocks."""
    cache = torch.arange(4 * 3 * 2 * 2 * 2 * 2.0).view(4, 3, 2, 2, 2, 2)
    before = cache.clone()
    buffer = torch.empty(2, 2, 2, 2, 2, 2)
    gather_heads(cache, [3, 0], range(1, 3), buffer)
    assert torch.equal(buffer[0], before[3, 1:3])
    assert torch.equal(buffer[1], before[0, 1:3])
    scatter_heads(cache, [1, 2], range(1, 3), buffer)
    assert torch.equal(cache[1, 1:3], before[3, 1:3])
    assert torch.equal(cache[2, 1:3], before[0, 1:3])
    assert torch.equal(cache[:, :1], before[:, :1])


def test_no_blocks_are_no_work() -> None:
    """An empty list moves nothing."""
    cache, buffer = torch.zeros(2, 1, 1, 2, 1, 1), torch.empty(0, 1, 1, 2, 1, 1)
    gather_heads(cache, [], range(1), buffer)
    scatter_heads(cache, [], range(1), buffer)


@pytest.mark.parametrize(
    ("blocks", "heads", "rows", "message"),
    [
        ([0, 4], range(2), 2, "not 0 to 4"),
        ([-1, 0], range(2), 2, "not -1 to 0"),
        ([0, 1], range(1, 4), 2, r"not range\(1, 4\)"),
        ([0, 1], range(0), 2, r"not range\(0, 0\)"),
        ([0, 1], range(2), 3, r"not \(3, 2, 1, 2, 1, 1\)"),
        ([1, 1], range(2), 2, r"distinct, not \[1, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(blocks: list[int], heads: range, rows: int, message: str) -> None:
    """With the value in the message; nothing is written."""
    cache = torch.zeros(4, 3, 1, 2, 1, 1)
    with pytest.raises(ValueError, match=message):
        scatter_heads(cache, blocks, heads, torch.ones(rows, 2, 1, 2, 1, 1))
    assert not cache.any()


def test_another_device_is_refused() -> None:
    """No device is served by another one's code."""
    cache = torch.empty(4, 3, 1, 2, 1, 1, device="meta")
    with pytest.raises(ValueError, match="not on meta"):
        gather_heads(cache, [0], range(1), torch.empty(1, 1, 1, 2, 1, 1, device="meta"))
