"""The launch spec travels through a pipe and never shows its secrets."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.worker_thread import SECRET, launch_spec
from twostroke.ipc.launch import (
    LAUNCH_FD_VARIABLE,
    MAX_SPEC_BYTES,
    LaunchSpec,
    read_launch_spec,
    write_launch_spec,
)
from twostroke.ipc.supervise import PARENT_PID_VARIABLE
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import ConfigError, ProtocolError
from twostroke.protocol.worker import Role


def environment(descriptor: int) -> dict[str, str]:
    """What a launcher sets."""
    return {LAUNCH_FD_VARIABLE: str(descriptor), PARENT_PID_VARIABLE: str(os.getppid())}


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process from dying with the shell that runs the tests."""
    monkeypatch.setattr("twostroke.ipc.launch.die_with_parent", lambda _pid: None)


def test_a_spec_arrives_unchanged(survivor: None) -> None:
    """Through a real pipe, closed by the writer."""
    read_end, write_end = os.pipe()
    with launch_spec() as spec:
        write_launch_spec(write_end, spec)
        assert read_launch_spec(environment(read_end)) == spec


def test_each_launch_draws_its_own_epoch_key_and_nonce() -> None:
    """Two launches share nothing that a message could be replayed with."""
    with launch_spec() as first, launch_spec() as second:
        assert len({first.epoch, second.epoch}) == 2
        assert len({first.key, second.key}) == 2
        assert len({first.nonce, second.nonce}) == 2


def test_a_spec_does_not_show_its_secrets() -> None:
    """Neither does its session."""
    with launch_spec() as spec:
        shown = f"{spec!r} {spec} {spec.session!r}"
        for hidden in (spec.key, SECRET, spec.nonce):
            assert repr(hidden)[2:-1] not in shown
            assert hidden.hex() not in shown


def test_a_process_without_a_launcher_is_told_how_a_worker_starts() -> None:
    """Someone ran `python -m twostroke.worker` by hand."""
    with pytest.raises(ConfigError, match="twostroke serve"):
        read_launch_spec({})


def test_a_launcher_that_died_before_writing_is_noticed(survivor: None) -> None:
    """The pipe ends without a spec."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises(ProtocolError, match="0 bytes"):
        read_launch_spec(environment(read_end))


def test_a_spec_larger_than_a_pipe_is_refused_at_once() -> None:
    """Instead of blocking the launcher; the pipe is closed."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        model = ModelConfig(path="x" * MAX_SPEC_BYTES)
        spec = LaunchSpec.draw(Role.CONTEXT, model, EngineConfig(), secret=None, directory=Path(directory))
        with pytest.raises(ConfigError, match=f"over {MAX_SPEC_BYTES}"):
            write_launch_spec(write_end, spec)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_directory_too_deep_for_sockets_is_refused_with_a_way_out() -> None:
    """A UNIX socket's path has 107 bytes."""
    with pytest.raises(ConfigError, match="TMPDIR"):
        LaunchSpec.draw(Role.CONTEXT, ModelConfig(), EngineConfig(), secret=None, directory=Path("/" + "d" * 110))
