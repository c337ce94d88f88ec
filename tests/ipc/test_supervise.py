"""What a supervised process says, and that it does not outlive its supervisor."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from twostroke.ipc.supervise import (
    PARENT_PID_VARIABLE,
    READY_FD_VARIABLE,
    PartProgress,
    PartReady,
    announce_progress,
    announce_ready,
    decode_event,
    die_with_supervisor,
)

ROOT = Path(__file__).resolve().parents[2]


def test_announcements_cross_the_pipe_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the pipe is closed to the part's own children."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    monkeypatch.setenv(READY_FD_VARIABLE, str(writing))
    announce_progress("loading weights")
    announce_ready("http://127.0.0.1:8080", worker="tcp://127.0.0.1:7000")
    assert not os.get_inheritable(writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.readlines()
    assert (
        lines[1] == b'{"event":"ready","http":"http://127.0.0.1:8080","admin":null,"worker":"tcp://127.0.0.1:7000"}\n'
    )
    assert [decode_event(line) for line in lines] == [
        PartProgress("loading weights"),
        PartReady("http://127.0.0.1:8080", None, "tcp://127.0.0.1:7000"),
    ]


def test_a_part_started_by_hand_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to tell, and nobody to die with."""
    monkeypatch.delenv(READY_FD_VARIABLE, raising=False)
    announce_ready("http://127.0.0.1:8080")
    die_with_supervisor({})


def test_a_supervisor_that_no_longer_listens_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part serves its clients all the same."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setenv(READY_FD_VARIABLE, str(writing))
    announce_progress("loading weights")
    os.close(writing)


@pytest.mark.parametrize("line", [b"", b"ready\n", b'{"event": "danced"}\n', b'{"event": "ready"}\n'])
def test_lines_that_are_no_events_are_refused(line: bytes) -> None:
    """With one kind of error, whatever is wrong."""
    with pytest.raises(msgspec.DecodeError):
        decode_event(line)


def test_a_process_whose_parent_is_gone_already_ends() -> None:
    """Its parent died between starting it and its asking the kernel to watch."""
    script = "import os; from twostroke.ipc.supervise import die_with_supervisor; die_with_supervisor(os.environ)"
    environment = os.environ | {PARENT_PID_VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr == "parent process 1 is gone; ending\n"
