"""`scripts/setup` with stand-ins for Python and pip: what is installed, in which order, and when nothing is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
# Records pip's arguments; `-m venv DIR` copies this file to where an environment has its programs.
case "$*" in
    --version) echo Python 3.11.0 ;;
    -c*) exit "${FAKE_TOO_OLD:-0}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/twostroke" ;;
    "-m pip "*) echo "$*" >> calls; case "$*" in *"${FAKE_BROKEN:-nothing}"*) exit 1 ;; esac ;;
    *) echo "twostroke $*" >> calls ;;
esac
"""


class Checkout:
    """A copy of what set-up reads, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "setup", folder / "scripts" / "setup")
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
        (folder / "fake-python").write_text(FAKE_PYTHON)
        (folder / "fake-python").chmod(0o755)

    def setup(self, **variables: str) -> tuple[int, list[str]]:
        """Run set-up; its exit status and the calls that it made."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(self.folder / "fake-python"), **variables}
        done = subprocess.run(
            [str(self.folder / "scripts" / "setup")],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            check=False,
            timeout=30,
        )
        return done.returncode, calls.read_text().splitlines() if calls.exists() else []

    def append(self, file: str, text: str) -> None:
        """Change a file."""
        with (self.folder / file).open("a") as opened:
            opened.write(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh one."""
    return Checkout(tmp_path)


TORCH = "-m pip install --requirement requirements/cpu.txt --constraint requirements/constraints.txt"
PROJECT = f"{TORCH} --editable .[demo] --group dev"
MODEL = "twostroke model fetch"


def test_torch_comes_first_and_by_itself_then_the_rest_then_the_model(checkout: Checkout) -> None:
    """So that no other package decides torch's version or build."""
    code, calls = checkout.setup()
    assert code == 0
    assert calls == ["-m pip install --quiet --upgrade pip>=25.1", TORCH, PROJECT, MODEL]


def test_a_second_run_installs_nothing(checkout: Checkout) -> None:
    """It only has the model looked at, which is quick."""
    checkout.setup()
    assert checkout.setup() == (0, [MODEL])


def test_a_changed_dependency_installs_again_and_a_changed_linter_setting_does_not(checkout: Checkout) -> None:
    """What was made from what is told by content."""
    checkout.setup()
    checkout.append("pyproject.toml", "\n[tool.somebody]\nsetting = 1\n")
    assert checkout.setup() == (0, [MODEL])
    text = (checkout.folder / "pyproject.toml").read_text()
    (checkout.folder / "pyproject.toml").write_text(text.replace('"msgspec>=', '"msgspec>=0.1,>='))
    assert checkout.setup() == (0, [PROJECT, MODEL])
    checkout.append("requirements/constraints.txt", "extra==1\n")
    assert checkout.setup() == (0, [TORCH, PROJECT, MODEL])


def test_an_installation_that_broke_off_goes_on_where_it_was(checkout: Checkout) -> None:
    """Torch is not installed a second time."""
    assert checkout.setup(FAKE_BROKEN="--editable")[0] != 0
    assert checkout.setup() == (0, [PROJECT, MODEL])


def test_an_old_python_is_refused_before_anything_is_made(checkout: Checkout) -> None:
    """With what to type instead."""
    code, calls = checkout.setup(FAKE_TOO_OLD="1")
    assert code == 1
    assert calls == []
    assert not (checkout.folder / ".venv").exists()
