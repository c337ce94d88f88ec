"""The folder of a launch: private, complete, and gone at the end."""

import fcntl
import stat
from pathlib import Path

import pytest

from twostroke.cli.settings import load_settings
from twostroke.cli.up.launch_dir import LaunchDir
from twostroke.cli.up.plan import make_plan
from twostroke.cli.up.ports import PortPicker
from twostroke.protocol.config import ClusterConfig, EngineConfig, RouterConfig


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Launch folders of a test lie in the test's own folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_the_folder_and_its_secret() -> None:
    """The secret is what stands between a stranger on this host and the workers."""
    with LaunchDir() as launch:
        assert mode(launch.path) == 0o700
        assert mode(launch.secret_file) == 0o600
        assert len(bytes.fromhex(launch.secret_file.read_text())) == 32


def test_each_launch_has_another_secret() -> None:
    """A part of one launch cannot talk to another's."""
    with LaunchDir() as one, LaunchDir() as other:
        assert one.secret_file.read_text() != other.secret_file.read_text()


def test_a_part_reads_back_the_configuration_that_was_planned() -> None:
    """Enums, tuples and None survive the YAML."""
    with LaunchDir() as launch:
        config = ClusterConfig(router=RouterConfig(port=0), context=EngineConfig(replicas=2))
        plan = make_plan(config, PortPicker(), str(launch.secret_file))
        for part in (*plan.servers, plan.router):
            assert load_settings(launch.write_config(part)) == part.config


def test_nothing_is_left_at_the_end(temporary_folders: Path) -> None:
    """Even if the launch failed."""

    def fail() -> None:
        with LaunchDir() as launch:
            launch.log_file("router").write_text("a line\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(temporary_folders.iterdir()) == []


def test_logs_are_kept_where_the_user_says(tmp_path: Path) -> None:
    """And their last lines can be shown."""
    kept = tmp_path / "kept" / "logs"
    with LaunchDir(kept) as launch:
        launch.log_file("router").write_text("one\ntwo\nthree\n")
        assert launch.last_lines("router", 2) == ["two", "three"]
        assert launch.last_lines("context-0", 2) == []
    assert (kept / "router.log").exists()


def test_folders_of_killed_launches_are_removed_and_those_of_live_ones_kept(temporary_folders: Path) -> None:
    """A launch that was killed could not clean up; its lock is free."""
    killed = temporary_folders / "twostroke-up-killed"
    killed.mkdir()
    (killed / "lock").touch()
    living = temporary_folders / "twostroke-up-living"
    living.mkdir()
    with (living / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with LaunchDir():
            assert not killed.exists()
            assert living.exists()
