"""`twostroke up` from a configuration to an exit status, with stand-ins for the parts."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from twostroke.cli.errors import EXIT_WRONG_CONFIG
from twostroke.cli.up import command
from twostroke.cli.up.launch_dir import LaunchDir
from twostroke.cli.up.part import PartCommand
from twostroke.cli.up.plan import PartPlan
from twostroke.protocol.config import ClusterConfig, EngineConfig, ModelConfig, RouterConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ClusterConfig(
    model=ModelConfig(path="/models/m"), router=RouterConfig(port=0), generation=EngineConfig(replicas=2)
)


class StandIns:
    """Replaces the parts' processes; remembers the launch's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.modes: dict[str, str] = {}
        self.folders: set[Path] = set()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr(PartCommand, "of", self._command)

    def _command(self, planned: PartPlan, launch: LaunchDir) -> PartCommand:
        self.folders.add(launch.path)
        mode = ["answering", planned.http.rpartition(":")[2]] if planned.name == "router" else ["ready"]
        mode = [self.modes[planned.name]] if planned.name in self.modes else mode
        words = [sys.executable, "-m", "tests.support.fake_part", *mode]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return PartCommand(planned.name, words, launch.log_file(planned.name), environment)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIns:
    """Parts that become ready at once, with a router that answers."""
    return StandIns(monkeypatch, tmp_path)


def test_up_says_where_it_serves_and_how_to_ask_and_leaves_nothing(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One launch, stopped by the signal of Ctrl-C as soon as it announces that it is ready."""
    announced: list[str] = []

    def stop_when_ready(http: str, *, admin: str) -> None:
        announced.extend([http, admin])
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command, "announce_ready", stop_when_ready)
    assert command.run(CONFIG, None) == 0
    http, admin = announced
    lines = capsys.readouterr().out.splitlines()
    curl = next(line for line in lines if line.strip().startswith("curl "))
    assert shlex.split(curl)[1] == f"{http}/v1/chat/completions"
    assert any(line.startswith(f"m is served at {http}/v1 (admin: {admin})") for line in lines)
    assert lines[-1] == "stopped"
    assert len(stand_ins.folders) == 1
    assert not any(folder.exists() for folder in stand_ins.folders)


def test_up_ends_with_the_log_of_a_part_whose_settings_are_wrong(
    stand_ins: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message that explains it, and the exit status that says not to try again."""
    stand_ins.modes["generation-1"] = "wrong-config"
    assert command.run(CONFIG, None) == EXIT_WRONG_CONFIG
    shown = capsys.readouterr().out
    assert "--- last lines of generation-1 ---" in shown
    assert "context.port: Expected `int`" in shown
    assert shown.endswith("twostroke: error: generation-1 ended with exit status 2\n")
    assert not any(folder.exists() for folder in stand_ins.folders)
