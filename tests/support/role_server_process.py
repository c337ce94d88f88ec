"""`python -m tests.support.role_server_process ROLE CONFIG`: a role's server over the fake worker world.

It ends as the command line ends it: a wrong setting gives exit code 2, any other failure 1, with one line of text.
"""

from pathlib import Path

import typer
import yaml

from twostroke.cli.errors import reported
from twostroke.frontend.role_server import run_role_server
from twostroke.protocol.config import parse_config
from twostroke.protocol.worker import Role


@reported
def main(role: str, config: str) -> None:
    """Run the server."""
    document = yaml.safe_load(Path(config).read_text("utf-8"))
    raise typer.Exit(run_role_server(Role(role), "tests.support.fake_worker", parse_config(document, config)))


if __name__ == "__main__":
    typer.run(main)
