"""The options of `twostroke doctor`, and its exit status."""

from typing import Annotated

import msgspec
import typer

from twostroke.cli import options
from twostroke.cli.errors import EXIT_FAILURE


def doctor(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Hugging Face folder (default: the demo model).", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Look at this host, the model and the configuration: what would keep them from serving, or from serving well.

    Moves a block of memory between two processes to see which transports UCX chooses, asks torch for GPUs, and reads
    the model's folder but not its weights. Takes seconds, or minutes where a driver hangs. Changes nothing.

    Exit status: 0 this host can serve, whatever the warnings; 1 it cannot, since there is a problem.

    For example:

        twostroke doctor /models/m --config cluster.yaml

        twostroke doctor --json | jq '.findings[] | select(.status != "ok")'
    """
    from twostroke.cli.doctor import session  # noqa: PLC0415 - `twostroke router` does not need it

    report = session.diagnose(directory, config_file, assignments or [])
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        session.show(report)
    raise typer.Exit(0 if report.can_serve else EXIT_FAILURE)
