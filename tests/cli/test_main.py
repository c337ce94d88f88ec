"""The command line as a person meets it: help, errors, exit statuses, and what each command imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twostroke import __version__
from twostroke.cli.main import app

COMMANDS = ["up", "serve", "router", "context-server", "generation-server", "bench", "model", "doctor", "version"]
LIGHT_MODULES = [
    "twostroke.cli.up.command",
    "twostroke.cli.doctor.session",
    "twostroke.frontend.serve",
    "router.main",
    "context_server.main",
    "generation_server.main",
]
HEAVY = {"torch", "triton", "transformers", "ucxx", "numba"}


@pytest.fixture
def runner() -> CliRunner:
    """A terminal wide enough that help is not wrapped."""
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def test_help_names_every_command(runner: CliRunner) -> None:
    """Each with a sentence."""
    text = runner.invoke(app, ["--help"]).output
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "version"])
def test_each_command_has_help(runner: CliRunner, command: str) -> None:
    """With its options."""
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version(runner: CliRunner) -> None:
    """The package's version and nothing else."""
    assert runner.invoke(app, ["version"]).output == f"{__version__}\n"


@pytest.mark.parametrize("command", ["up", "serve", "router", "context-server", "generation-server"])
def test_a_wrong_setting_is_one_line_and_exit_status_2(runner: CliRunner, tmp_path: Path, command: str) -> None:
    """Which tells a supervisor that another start would not help."""
    file = tmp_path / "cluster.yaml"
    file.write_text("context: {max_sequences: none}\n")
    result = runner.invoke(app, [command, "--config", str(file)])
    assert result.exit_code == 2
    assert result.stderr == f"twostroke: error: {file}: context.max_sequences: expected a whole number, got 'none'\n"


def test_a_missing_model_is_one_line_and_exit_status_2(runner: CliRunner) -> None:
    """Before anything is started."""
    result = runner.invoke(app, ["up", "--model", "/nowhere/m"])
    assert result.exit_code == 2
    assert result.stderr == "twostroke: error: model.path: /nowhere/m does not exist\n"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_processes_that_run_no_model_load_no_engine(module: str) -> None:
    """So that they start fast and stay small; the world that runs the model is a process of its own."""
    script = f"import json, sys, twostroke.cli.main, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    assert HEAVY.isdisjoint(json.loads(done.stdout))


def test_a_part_whose_supervisor_is_gone_does_not_start() -> None:
    """Its parent's process id is not the one that it was given."""
    environment = os.environ | {"TWOSTROKE_PARENT_PID": "1"}
    command = [sys.executable, "-m", "twostroke.cli", "version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "parent process 1 is gone" in done.stderr
