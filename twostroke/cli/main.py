"""`twostroke`: one command for every part.

    up                 router, context and generation servers on this host, supervised
    serve [DIR]        one server that runs both phases
    router | context-server | generation-server    one part, as a cluster starts it
    bench              load on an OpenAI-compatible endpoint, and its figures
    model              the demo model and the cache
    doctor [DIR]       whether this host can serve, and what would make it serve better
    version

Exit status: 0 stopped when asked, 1 failed, 2 a setting or the model is wrong.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from twostroke import __version__
from twostroke.cli import options
from twostroke.cli.bench.command import bench
from twostroke.cli.doctor.command import doctor
from twostroke.cli.errors import reported
from twostroke.cli.model.commands import app as model_app
from twostroke.cli.model.commands import fetch_with_progress
from twostroke.cli.settings import Overrides, check_folder_is_whole, check_model_path, load_settings, with_model
from twostroke.ipc.logs import configure_logs
from twostroke.ipc.supervise import announce_progress, die_with_supervisor
from twostroke.protocol.config import ClusterConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Disaggregated prefill/decode serving for large language models.",
)
app.add_typer(model_app, name="model")
app.command()(bench)
app.command()(doctor)


def main() -> None:
    """Entry point. A supervised part dies with its supervisor from here on."""
    die_with_supervisor(os.environ)
    app()


@app.command()
@reported
def up(
    context: Annotated[int | None, typer.Option(min=1, help="Context servers (default: 1).")] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Generation servers (default: 1).")] = None,
    model: options.ModelPath = None,
    host: options.Host = None,
    port: options.Port = None,
    dtype: options.DtypeOption = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Keep each part's log here (default: a folder removed at the end).", metavar="DIR"),
    ] = None,
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Start router, context and generation servers on this host and keep them running until Ctrl-C."""
    overrides: Overrides = {
        "context.replicas": context,
        "generation.replicas": generation,
        "model.path": model,
        "model.dtype": dtype,
        "router.host": host,
        "router.port": port,
    }
    config = _with_some_model(load_settings(config_file, assignments or (), overrides))
    check_folder_is_whole(config.model.path)
    from twostroke.cli.up.command import run

    raise typer.Exit(run(config, log_dir))


@app.command()
@reported
def serve(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Hugging Face folder (default: the demo model).", show_default=False),
    ] = None,
    host: options.Host = None,
    port: options.Port = None,
    dtype: options.DtypeOption = None,
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Serve a model with both phases on one engine: the same endpoints, without a router."""
    overrides: Overrides = {
        "model.path": directory,
        "model.dtype": dtype,
        "aggregated.host": host,
        "aggregated.port": port,
    }
    config = _with_some_model(load_settings(config_file, assignments or (), overrides))
    check_folder_is_whole(config.model.path)
    from twostroke.frontend.serve import run

    _run_part(run, config)


@app.command()
@reported
def router(
    context: options.WorkerAddresses = None,
    generation: options.WorkerAddresses = None,
    model: options.ModelPath = None,
    host: options.Host = None,
    port: options.Port = None,
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Start the router: the HTTP endpoint of a cluster. It attaches to context and generation workers."""
    overrides: Overrides = {
        "workers.context": context or None,
        "workers.generation": generation or None,
        "model.path": model,
        "router.host": host,
        "router.port": port,
    }
    config = _with_some_model(load_settings(config_file, assignments or (), overrides))
    from router.main import run

    _run_part(run, config)


@app.command()
@reported
def context_server(
    model: options.ModelPath = None,
    host: options.Host = None,
    port: options.Port = None,
    worker_bind: options.WorkerBind = None,
    dtype: options.DtypeOption = None,
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Start a context server: it reads prompts and makes first tokens."""
    overrides = _server_overrides("context", model, dtype, host, port, worker_bind)
    config = _with_some_model(load_settings(config_file, assignments or (), overrides))
    from context_server.main import run

    _run_part(run, config)


@app.command()
@reported
def generation_server(
    model: options.ModelPath = None,
    host: options.Host = None,
    port: options.Port = None,
    worker_bind: options.WorkerBind = None,
    dtype: options.DtypeOption = None,
    config_file: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Start a generation server: it takes KV caches over and makes all later tokens."""
    overrides = _server_overrides("generation", model, dtype, host, port, worker_bind)
    config = _with_some_model(load_settings(config_file, assignments or (), overrides))
    from generation_server.main import run

    _run_part(run, config)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _server_overrides(
    section: str, model: str | None, dtype: str | None, host: str | None, port: int | None, worker_bind: str | None
) -> Overrides:
    return {
        "model.path": model,
        "model.dtype": dtype,
        f"{section}.host": host,
        f"{section}.port": port,
        f"{section}.worker_bind": worker_bind,
    }


def _with_some_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with an absolute model path; the demo model's where none is named."""
    path = check_model_path(config.model.path) if config.model.path else str(fetch_with_progress())
    return with_model(config, path)


def _run_part(run: Callable[[ClusterConfig], int], config: ClusterConfig) -> None:
    configure_logs(run.__module__.removeprefix("twostroke.frontend.").removesuffix(".main"))
    announce_progress("libraries")
    raise typer.Exit(run(config))
