"""`scripts/scale-*.sh` with a stand-in for kubectl that records what it is asked."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROLES = ["context", "generation"]


class Kubectl:
    """A stand-in: writes its arguments to a file, one call a line, and exits as told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kubectl"
        self._calls = folder / "calls"
        self.behave(0)

    def behave(self, code: int) -> None:
        """Exit with `code` from now on."""
        self.path.write_text(f'#!/bin/sh\necho "$*" >> {self._calls}\nexit {code}\n')
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """What it was asked."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path) -> Kubectl:
    """A kubectl that always succeeds."""
    return Kubectl(tmp_path)


def scale(kubectl: Kubectl, role: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a scaling script."""
    environment = {"PATH": os.environ["PATH"], "KUBECTL": str(kubectl.path), **variables}
    command = [str(SCRIPTS / f"scale-{role}.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


def selector(role: str, release: str) -> str:
    """Labels that the chart gives to a role's deployment."""
    return (
        "--selector app.kubernetes.io/name=twostroke,"
        f"app.kubernetes.io/instance={release},app.kubernetes.io/component={role}"
    )


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_scaled_and_waited_for(kubectl: Kubectl, role: str) -> None:
    """Only that role's deployment, found by the chart's labels."""
    done = scale(kubectl, role, "4", "--release", "demo", "--namespace", "prod")
    assert done.returncode == 0, done.stderr
    where = f"{selector(role, 'demo')} --namespace prod"
    assert kubectl.calls == [
        f"scale deployment {where} --replicas 4",
        f"rollout status deployment {where} --timeout 900s",
    ]


def test_release_and_namespace_may_come_from_the_environment(kubectl: Kubectl) -> None:
    """And without a namespace kubectl's own applies."""
    scale(kubectl, "context", "2", "--timeout", "0", TWOSTROKE_RELEASE="demo", TWOSTROKE_NAMESPACE="prod")
    scale(kubectl, "context", "2", "--timeout", "0")
    assert kubectl.calls == [
        f"scale deployment {selector('context', 'demo')} --namespace prod --replicas 2",
        f"scale deployment {selector('context', 'twostroke')} --replicas 2",
    ]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage:"),
        (["0"], "must be from 1 to 1000, got '0'"),
        (["-1"], "unknown option -1"),
        (["2x"], "got '2x'"),
        (["08"], "got '08'"),
        (["1001"], "got '1001'"),
        (["2", "3"], "one number of servers, please: got 2 and 3"),
        (["2", "--release"], "--release needs a value"),
        (["2", "--release", "a,b=c"], "no release can be named 'a,b=c'"),
        (["2", "--timeout", "soon"], "--timeout must be a number of seconds, got 'soon'"),
    ],
)
def test_wrong_arguments_reach_no_cluster(kubectl: Kubectl, role: str, arguments: list[str], message: str) -> None:
    """Exit status 2, and kubectl is never called."""
    done = scale(kubectl, role, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert kubectl.calls == []


def test_a_failure_of_kubectl_is_the_failure_of_the_script(kubectl: Kubectl) -> None:
    """And nothing is waited for."""
    kubectl.behave(1)
    assert scale(kubectl, "generation", "2").returncode == 1
    assert len(kubectl.calls) == 1


def test_a_missing_kubectl_is_named(kubectl: Kubectl) -> None:
    """Instead of a shell's message."""
    done = scale(kubectl, "context", "2", KUBECTL="/absent/kubectl")
    assert done.returncode == 2
    assert "/absent/kubectl is not installed" in done.stderr
