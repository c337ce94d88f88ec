"""A whole cluster as a user starts it: `twostroke up` in a process of its own, on free ports."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.processes import alive, command_line, descendants, wait_until
from twostroke.ipc.supervise import READY_FD_VARIABLE, PartReady, decode_event

START_S = 120.0
STOP_S = 10.0


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        process: `twostroke up`.
        http: Base URL of the router's public port.
        admin: Base URL of its admin port.
        log_dir: Where the parts' logs are.
    """

    process: subprocess.Popen[bytes]
    http: str
    admin: str
    log_dir: Path

    def workers(self, role: str) -> list[int]:
        """Pids of the worker processes (not the HTTP processes) of a role."""
        return [pid for pid in descendants(self.process.pid) if f"{role}_server.worker" in command_line(pid)]

    def kill_worker(self, role: str, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send `sig` to the first worker of `role`; its pid."""
        pid = self.workers(role)[0]
        os.kill(pid, sig)
        return pid

    def ready(self) -> bool:
        """Whether the router answers that it is ready."""
        try:
            return httpx.get(f"{self.http}/ready", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def wait_ready(self, within_s: float = START_S) -> None:
        """Wait until it is ready (again)."""
        wait_until(self.ready, within_s, f"the cluster is ready again; logs in {self.log_dir}")

    def ledger(self) -> Any:
        """The admin port's view of the requests."""
        return httpx.get(f"{self.admin}/ledger", timeout=5.0, trust_env=False).json()

    def worker_states(self) -> Any:
        """The admin port's view of the workers."""
        return httpx.get(f"{self.admin}/workers", timeout=5.0, trust_env=False).json()

    def busy_blocks(self) -> dict[str, int]:
        """KV blocks that are neither free nor cached, by `role/state`, as the router's metrics tell."""
        text = httpx.get(f"{self.http}/metrics", timeout=5.0, trust_env=False).text
        busy: dict[str, int] = {}
        for line in text.splitlines():
            if line.startswith("twostroke_kv_blocks{"):
                labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
                state = labels["state"].strip('"')
                count = int(float(line.rpartition(" ")[2]))
                if state not in {"free", "cached"} and count:
                    busy[f"{labels['role'].strip(chr(34))}/{state}"] = count
        return busy

    def wait_idle(self, within_s: float = 20.0) -> None:
        """Wait until every KV block is free or cached, on every worker."""
        try:
            wait_until(lambda: not self.busy_blocks(), within_s, "all KV blocks are free or cached")
        except TimeoutError as error:
            raise AssertionError(f"{error}: {self.busy_blocks()}") from None

    def stop(self) -> float:
        """Ctrl-C; seconds until the process had ended."""
        pids = descendants(self.process.pid)
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S + 5)
        finally:
            for pid in [self.process.pid, *pids]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
        return time.monotonic() - started


@contextmanager
def running_cluster(
    model_dir: Path, log_dir: Path, config: dict[str, Any] | None = None, *options: str
) -> Iterator[Cluster]:
    """`twostroke up` on a model folder, stopped at the end.

    Args:
        model_dir: What to serve.
        log_dir: Where logs and the configuration go.
        config: The YAML document; ports default to free ones.
        options: Further options of `up`.
    """
    document = {"router": {"port": 0}, **(config or {})}
    arguments = ("--model", str(model_dir), "--log-dir", str(log_dir), *options)
    with _started("up", document, log_dir, *arguments) as cluster:
        yield cluster


@contextmanager
def running_server(model_dir: Path, log_dir: Path, config: dict[str, Any] | None = None) -> Iterator[Cluster]:
    """`twostroke serve` on a model folder: both phases in one worker, without a router."""
    document = {"aggregated": {"port": 0}, **(config or {})}
    with _started("serve", document, log_dir, str(model_dir)) as server:
        yield server


@contextmanager
def _started(subcommand: str, document: dict[str, Any], log_dir: Path, *arguments: str) -> Iterator[Cluster]:
    log_dir.mkdir(parents=True, exist_ok=True)
    config_file = log_dir / "cluster.yaml"
    config_file.write_text(yaml.safe_dump(document))
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "twostroke.cli", subcommand, "--config", str(config_file), *arguments]
    log_file = log_dir / f"{subcommand}.log"
    with log_file.open("wb") as output, os.fdopen(reader, "rb") as events:
        process = subprocess.Popen(
            command,
            env={**os.environ, READY_FD_VARIABLE: str(writer)},
            pass_fds=[writer],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writer)
        cluster = Cluster(process, "", "", log_dir)
        try:
            ready = _await_ready(events.fileno(), log_file)
            cluster.http, cluster.admin = ready.http, ready.admin or ""
            yield cluster
        finally:
            cluster.stop()


def _await_ready(fd: int, log_file: Path) -> PartReady:
    deadline = time.monotonic() + START_S
    selector = selectors.DefaultSelector()
    selector.register(fd, selectors.EVENT_READ)
    pending = b""
    while time.monotonic() < deadline:
        if not selector.select(timeout=deadline - time.monotonic()):
            break
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        pending += chunk
        *lines, pending = pending.split(b"\n")
        for line in lines:
            event = decode_event(line)
            if isinstance(event, PartReady):
                return event
    ending = "\n".join(log_file.read_text(errors="replace").splitlines()[-40:])
    raise RuntimeError(f"not ready; {log_file} ends:\n{ending}")
