"""A role's server process: readiness, metrics, and its end with or without its world. The model is an instant fake."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.processes import alive, children, wait_until
from twostroke.ipc.secret import new_secret, save_secret
from twostroke.ipc.supervise import PARENT_PID_VARIABLE, READY_FD_VARIABLE, PartProgress, PartReady, decode_event
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster

READY_S = 30.0
WAIT_S = 10.0


@dataclass
class Server:
    """A running server process and the pipe that it announces its readiness on."""

    process: subprocess.Popen[bytes]
    announcements: int

    def wait_ready(self) -> PartReady:
        """Read announcements until the one that matters."""
        with os.fdopen(self.announcements, "rb") as pipe:
            for line in pipe:
                event = decode_event(line)
                if isinstance(event, PartReady):
                    return event
                assert isinstance(event, PartProgress)
        raise AssertionError(f"the server ended with {self.process.wait(READY_S)} before it was ready")


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers; all are ended in the end."""
    servers: list[Server] = []
    save_secret(new_secret(), tmp_path / "secret")

    def run(role: Role, path: str = "", secret_file: str | None = str(tmp_path / "secret")) -> Server:
        section = {"shutdown_s": 5.0, "kv_cache": {"block_size": 4, "num_blocks": 32}}
        document = {
            "model": {"path": path},
            "security": {"secret_file": secret_file},
            role.value: {**section, "port": 0},
        }
        config = tmp_path / f"{role}.yaml"
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.role_server_process", role.value, str(config)],
            env={**os.environ, READY_FD_VARIABLE: str(write_end), PARENT_PID_VARIABLE: str(os.getpid())},
            pass_fds=(write_end,),
            stderr=subprocess.PIPE,
        )
        os.close(write_end)
        servers.append(Server(process, read_end))
        return servers[-1]

    yield run
    for server in servers:
        server.process.kill()
        server.process.wait(READY_S)
        assert server.process.stderr is not None
        server.process.stderr.close()


@pytest.mark.parametrize("role", [Role.CONTEXT, Role.GENERATION])
def test_a_server_becomes_ready_and_stops_in_order(start: Start, role: Role) -> None:
    """Probes answer, metrics carry the blocks of its worker, and SIGTERM ends server and world with 0."""
    server = start(role)
    ready = server.wait_ready()
    assert ready.worker.startswith("tcp://127.0.0.1:")
    assert httpx.get(f"{ready.http}/health").status_code == 200
    assert httpx.get(f"{ready.http}/ready").json() == {"status": "ready", "worker": ready.worker}
    sample = f'twostroke_kv_blocks{{role="{role}",state="free",worker="{ready.worker}"}} 32.0'
    wait_until(lambda: sample in httpx.get(f"{ready.http}/metrics").text, WAIT_S, f"the metrics have {sample}")
    (world,) = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    assert not alive(world)


def test_a_server_is_unready_while_its_world_loads(start: Start) -> None:
    """Until the world is ready `/health` says 200 and `/ready` 503; SIGTERM then ends both at once."""
    server = start(Role.CONTEXT, path="load=60")
    with os.fdopen(server.announcements, "rb") as pipe:
        assert isinstance(decode_event(pipe.readline()), PartProgress)
    (world,) = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    wait_until(lambda: not alive(world), WAIT_S, "the world is gone")


def test_a_server_ends_with_its_world(start: Start) -> None:
    """When the world dies the server says so and exits with 1, for its supervisor to start both anew."""
    server = start(Role.CONTEXT)
    server.wait_ready()
    (world,) = children(server.process.pid)
    os.kill(world, signal.SIGKILL)
    assert server.process.wait(10) == 1
    assert server.process.stderr is not None
    assert b"SIGKILL" in server.process.stderr.read()


def test_a_model_that_cannot_be_served_ends_the_server(start: Start) -> None:
    """A start that another try would not mend exits with 2 and the worker's own words."""
    server = start(Role.GENERATION, path="broken")
    assert server.process.wait(READY_S) == 2
    assert server.process.stderr is not None
    assert b"is told to be broken" in server.process.stderr.read()


def test_a_role_needs_the_cluster_secret(start: Start) -> None:
    """Without one the server exits with 2 and says how to make one."""
    server = start(Role.CONTEXT, secret_file=None)
    assert server.process.wait(READY_S) == 2
    assert server.process.stderr is not None
    assert b"openssl rand -hex 32" in server.process.stderr.read()
