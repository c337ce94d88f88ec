"""`twostroke doctor` on this very machine: real child processes, real UCX, a tiny model."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from twostroke.cli.doctor import session
from twostroke.cli.doctor.child import ChildProbe
from twostroke.cli.doctor.facts import ProbeFault
from twostroke.cli.doctor.finding import REPORT_VERSION, Finding, Report, Status, make_report
from twostroke.cli.doctor.secret_files import look_at_api_keys, look_at_cluster_secret
from twostroke.cli.doctor.session import choose_patient, show
from twostroke.cli.main import app
from twostroke.protocol.config import ClusterConfig


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_tiny_model_and_cma(tmp_path: Path) -> None:
    """UCX really moves blocks: by cma within the host and by tcp beyond, as it would for a worker."""
    folder = save_tiny_model(tmp_path / "m", "llama", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(folder)
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o644)
    config = tmp_path / "cluster.yaml"
    config.write_text(f"security: {{secret_file: {secret}}}\ncontext: {{transfer: {{shared_memory: true}}}}\n")
    command = [sys.executable, "-m", "twostroke.cli", "doctor", str(folder), "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    report = msgspec.json.decode(done.stdout, type=Report)
    found = {finding.name: finding for finding in report.findings}
    assert done.returncode == 0, done.stdout
    assert report.can_serve
    assert report.report_version == REPORT_VERSION
    assert found["config.file"].status is Status.OK
    assert found["config.secret_file"].status is Status.WARNING
    assert "cma (zero-copy)" in found["ucx.transports.host.same_host"].found
    beyond = found["ucx.transports.host.across_hosts"].found
    assert "tcp over" in beyond or "no network interface" in beyond
    assert found["ucx.library"].found.startswith("UCX 1.")
    assert "llama" in found["model.folder"].found
    assert found["model.tokenizer"].status is Status.OK
    assert found["model.memory"].status is Status.OK


def test_a_host_that_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1; every problem stands in the table, whatever else is wrong."""

    async def fail(probe: ChildProbe, answer: type[object]) -> ProbeFault:
        return ProbeFault(f"died ({probe.module})")

    monkeypatch.setattr(session, "run_probe", fail)
    monkeypatch.setattr(session, "configure_logs", lambda _: None)
    config = tmp_path / "cluster.yaml"
    config.write_text("context: {max_sequences: none}\n")
    arguments = ["doctor", str(tmp_path), "--config", str(config)]
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments)
    assert result.exit_code == 1
    assert "context.max_sequences: expected a whole number, got 'none'" in result.output
    for module in ("gpu_probe", "transport_probe", "model_probe"):
        assert f"died (twostroke.cli.doctor.{module})" in result.output
    assert result.output.endswith("This host cannot serve: see each problem above.\n")


def test_which_model_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's, else the configuration's, else the demo model's; hub names and what is not here are not."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    assert "twostroke model fetch" in choose_patient(ClusterConfig(), None).model_note
    assert "hub" in choose_patient(ClusterConfig(), "org/m").model_note
    patient = choose_patient(ClusterConfig(), str(tmp_path))
    assert (patient.config.model.path, patient.model_note) == (str(tmp_path), "")


def test_secrets_are_read_as_a_server_reads_them(tmp_path: Path) -> None:
    """Their permissions are found, or why they are of no use; their content is not shown."""
    secret = tmp_path / "secret"
    assert look_at_cluster_secret(None) is None
    secret.write_text("5ec2e7")
    short = look_at_cluster_secret(str(secret))
    assert short is not None
    assert "must hold 32 bytes" in short.error
    assert "5ec2e7" not in short.error
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    good = look_at_cluster_secret(str(secret))
    assert good is not None
    assert (good.mode, good.error) == (0o600, "")
    keys = look_at_api_keys(str(tmp_path / "keys"))
    assert keys is not None
    assert "cannot be read" in keys.error


def test_text_with_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Paths and errors are no markup."""
    show(make_report("1", (Finding("x.y", Status.WARNING, "a [bold]path[/]", "mend [it]"),)))
    shown = capsys.readouterr().out
    assert "a [bold]path[/]" in shown
    assert "-> mend [it]" in shown
