"""One run of the doctor: configuration, model and host are read, everything is examined, and the report is shown."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twostroke import __version__
from twostroke.cli.doctor.checks.settings import check_api_keys, check_cluster_secret, check_config
from twostroke.cli.doctor.child import run_probe
from twostroke.cli.doctor.examine import Patient, examine
from twostroke.cli.doctor.finding import Finding, Report, Status, make_report
from twostroke.cli.doctor.host import look_at_host
from twostroke.cli.doctor.secret_files import look_at_api_keys, look_at_cluster_secret
from twostroke.cli.model import demo
from twostroke.cli.settings import load_settings, with_model
from twostroke.ipc.logs import configure_logs
from twostroke.protocol.config import ClusterConfig
from twostroke.protocol.errors import ConfigError

_STYLES = {Status.OK: "green", Status.NOTE: "cyan", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


def diagnose(directory: str | None, config_file: Path | None, assignments: Sequence[str]) -> Report:
    """Look at everything.

    Args:
        directory: The model's folder; None takes the configuration's, or else the demo model's.
        config_file: The configuration; None takes the defaults.
        assignments: Settings beside it, as `path=value`.
    """
    configure_logs("doctor")
    config, fault = _read_config(config_file, assignments)
    patient = choose_patient(config, directory)
    security = patient.config.security
    return make_report(
        __version__,
        (
            check_config(None if config_file is None else str(config_file), fault),
            check_cluster_secret(look_at_cluster_secret(security.secret_file)),
            check_api_keys(look_at_api_keys(security.api_keys_file)),
            *asyncio.run(examine(patient, run_probe)),
        ),
    )


def show(report: Report) -> None:
    """Print the report as a table."""
    table = Table("", "what", "found", box=None, padding=(0, 2, 0, 0))
    for finding in report.findings:
        table.add_row(f"[{_STYLES[finding.status]}]{finding.status}[/]", finding.name, _words(finding))
    console = Console()
    console.print(table)
    console.print("This host can serve." if report.can_serve else "This host cannot serve: see each problem above.")


def choose_patient(config: ClusterConfig, directory: str | None) -> Patient:
    """This host, with the folder of the command line, else the configuration's, else the demo model's if it is here."""
    host = look_at_host()
    named = directory or config.model.path
    if not named:
        if demo.is_fetched():
            return Patient(with_model(config, str(demo.folder())), host)
        note = "no model is named, and the demo model is not here yet; `twostroke model fetch` gets it"
        return Patient(config, host, note)
    path = Path(named).expanduser()
    if not path.exists() and not named.startswith(("/", ".", "~")):
        return Patient(config, host, f"{named} is no local folder: a server would ask the model hub for it")
    return Patient(with_model(config, str(path)), host)


def _read_config(file: Path | None, assignments: Sequence[str]) -> tuple[ClusterConfig, str]:
    """The configuration, and what is wrong with it; the defaults if anything is."""
    try:
        return load_settings(file, assignments), ""
    except ConfigError as error:
        return ClusterConfig(), str(error)


def _words(finding: Finding) -> str:
    return escape(finding.found) + (f"\n[bold]->[/] {escape(finding.todo)}" if finding.todo else "")
