"""Servers as a user starts them, in processes of their own on free ports: `twostroke up` and `twostroke serve`.

    start -> wait for its ready event -> Running (URL) -> Ctrl-C -> nothing of its session is left

What fails to start is shown with the end of its log. All die with the benchmark, however that ends.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.processes import tail
from twostroke.cli.model import demo
from twostroke.cli.up.process import session_members
from twostroke.ipc.supervise import PARENT_PID_VARIABLE, READY_FD_VARIABLE, PartReady, decode_event

START_S = 180.0
STOP_S = 15.0
PATIENCE_S = 60.0
"""A router that a busy machine keeps from running would else take its workers for dead."""

Document = Mapping[str, object]
"""A configuration as YAML has it."""


@dataclass(frozen=True, slots=True)
class Running:
    """Something that serves now.

    Attributes:
        url: Its public port, `http://host:port`.
        pid: The process that was started; all its processes are in its session or die with it.
    """

    url: str
    pid: int


def demo_model() -> Path:
    """The demo model's folder, made first if it is not there."""
    return demo.fetch(lambda stage: print(stage, file=sys.stderr))


@contextmanager
def running_cluster(model: Path, folder: Path, document: Document) -> Iterator[Running]:
    """`twostroke up`: a router, and a worker of each role.

    Args:
        model: What is served.
        folder: Logs and the configuration go there.
        document: The configuration; the router takes a free port and is patient unless it says otherwise.
    """
    arguments = ["--model", str(model), "--log-dir", str(folder)]
    router = {"port": 0, "suspect_after_s": PATIENCE_S, "dead_after_s": PATIENCE_S}
    with _running("up", {"router": router, **document}, folder, arguments) as cluster:
        yield cluster


@contextmanager
def running_server(model: Path, folder: Path, document: Document) -> Iterator[Running]:
    """`twostroke serve`: both phases in one engine, without a router; `aggregated` in `document` says how."""
    with _running("serve", document, folder, [str(model)]) as server:
        yield server


@contextmanager
def _running(subcommand: str, document: Document, folder: Path, arguments: list[str]) -> Iterator[Running]:
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yaml", folder / f"{subcommand}.log"
    config.write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    command = [sys.executable, "-m", "twostroke.cli", subcommand, "--config", str(config), *arguments]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as events, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, READY_FD_VARIABLE: str(writing), PARENT_PID_VARIABLE: str(os.getpid())},
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            yield Running(_await_ready(events.fileno(), log), process.pid)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and after `STOP_S` an end for certain, for the process and all that is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for pid in session_members(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(STOP_S)


def _await_ready(events: int, log: Path) -> str:
    """The URL that the process announces.

    Raises:
        RuntimeError: It ended first, or took too long.
    """
    deadline = time.monotonic() + START_S
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while selector.select(timeout=max(0.0, deadline - time.monotonic())):
            chunk = os.read(events, 1 << 12)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                event = decode_event(line)
                if isinstance(event, PartReady):
                    return event.http
    raise RuntimeError(f"not ready; {log} ends:\n{tail(log)}")
