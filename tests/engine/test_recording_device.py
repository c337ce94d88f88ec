"""The test double of a GPU refuses what a captured graph would get wrong."""

from collections.abc import Callable

import pytest
import torch

from tests.support.recording_device import NotCapturableError, RecordingDevice

BUFFER = torch.zeros(4)
OTHER = torch.ones(4)


def test_a_replay_reads_what_the_static_buffer_holds_by_then() -> None:
    """Same output tensor, new values."""
    buffer = torch.zeros(4)
    captured = RecordingDevice().capture(lambda: (buffer * 2.0)[:2] + 1.0, [buffer])
    output = captured.output
    buffer.fill_(3.0)
    captured.replay()
    assert captured.output is output
    assert output.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: BUFFER + OTHER, r"shape \(4,\), torch.float32, that is neither static nor made"),
        (lambda: BUFFER * float(BUFFER[0]), "needs the host"),
        (lambda: BUFFER[BUFFER > 0], "index.Tensor needs the host"),
        (lambda: BUFFER + torch.tensor(1.0), "lift_fresh.default needs the host"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_a_graph_cannot_replay_is_refused(
    step: Callable[[], torch.Tensor], message: str, inference: bool,  # noqa: FBT001 - a parameter of the test
) -> None:  # fmt: skip
    """Memory that may be gone, and values that go to the host or come from it."""
    with torch.inference_mode(inference), pytest.raises(NotCapturableError, match=message):
        RecordingDevice().capture(step, [BUFFER])


def test_a_step_that_changes_is_refused() -> None:
    """A graph would go on doing what was captured."""
    flags = [True]
    captured = RecordingDevice().capture(lambda: BUFFER + 1.0 if flags[0] else BUFFER * 2.0, [BUFFER])
    flags[0] = False
    with pytest.raises(NotCapturableError, match="unlike"):
        captured.replay()
