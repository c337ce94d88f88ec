"""Options that several commands share, so that each is explained once."""

from pathlib import Path
from typing import Annotated

import typer

from twostroke.protocol.config import Dtype

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML document that configures every part.", metavar="FILE", dir_okay=False),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting of that document, such as context.kv_cache.block_size=32; repeatable.",
        metavar="PATH=VALUE",
    ),
]
ModelPath = Annotated[
    str | None,
    typer.Option("--model", help="Hugging Face folder, or a hub name (default: the demo model).", metavar="DIR"),
]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="Element type (default: the model's own).")]
Host = Annotated[str | None, typer.Option("--host", help="Address of the HTTP port (default: 127.0.0.1).")]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        help="HTTP port; 0 takes a free one (default: 8000; context and generation servers: 0).",
        min=0,
        max=65535,
    ),
]
WorkerBind = Annotated[
    str | None,
    typer.Option(
        "--worker-bind", help="ZMQ address where routers attach (default: tcp://127.0.0.1:0).", metavar="ADDRESS"
    ),
]
WorkerAddresses = Annotated[
    list[str] | None,
    typer.Option(help="Address to attach to: tcp://host:port or dns://name:port; repeatable.", metavar="ADDRESS"),
]
