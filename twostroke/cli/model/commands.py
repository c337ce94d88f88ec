"""`twostroke model fetch | list | path`."""

import sys
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cli.errors import reported
from twostroke.cli.model import cache, demo

app = typer.Typer(no_args_is_help=True, help="The demo model and the cache of converted models.")

_MIB = 1 << 20


def fetch_with_progress() -> Path:
    """The demo model's folder, made first if needed, with progress on the error stream."""
    if demo.is_fetched():
        return demo.folder()
    console = Console(stderr=True)
    begun = time.monotonic()
    with console.status("demo model") as status:

        def report(text: str) -> None:
            status.update(f"demo model: {text}")
            if not console.is_terminal:
                print(f"demo model: {text}", file=sys.stderr, flush=True)  # noqa: T201  (plain lines for logs)

        path = demo.fetch(report)
    console.print(f"demo model: ready in {path} after {time.monotonic() - begun:.0f} s", soft_wrap=True)
    return path


@app.command()
@reported
def fetch() -> None:
    """Fetch and convert the demo model, unless it is in the cache and whole."""
    fetch_with_progress()


@app.command("list")
@reported
def list_models() -> None:
    """Show the models in the cache."""
    table = Table("name", "MiB", "state", box=None)
    folders = sorted(
        path for path in cache.models_folder().glob("*") if path.is_dir() and not path.name.startswith(".")
    )
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.iterdir())
        table.add_row(folder.name, f"{size / _MIB:.0f}", cache.fault(folder) or "whole")
    console = Console()
    console.print(table if folders else f"no models in {cache.models_folder()}; `twostroke model fetch` makes one")


@app.command()
@reported
def path() -> None:
    """Print the demo model's folder, for scripts."""
    fault = cache.fault(demo.folder(), demo.RECIPE)
    if fault:
        typer.echo(f"{demo.folder()}: {fault}; run `twostroke model fetch`", err=True)
        raise typer.Exit(1)
    typer.echo(demo.folder())
