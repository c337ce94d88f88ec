"""What a launcher tells the worker world that it starts.

    launcher                                    worker (`python -m MODULE`)
    draws epoch, key, nonce; makes a 0700 dir
    starts the process with a pipe ----------->  TWOSTROKE_LAUNCH_FD names the pipe, TWOSTROKE_PARENT_PID the launcher
    writes the spec, closes the pipe ---------->  read_launch_spec(): dies with its launcher from now on

Secrets travel through the pipe only: neither arguments nor environment variables hold them.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from twostroke.ipc.seal import KEY_BYTES, NONCE_BYTES, Session
from twostroke.ipc.supervise import PARENT_PID_VARIABLE, die_with_parent
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import ConfigError, ProtocolError
from twostroke.protocol.ids import draw_epoch
from twostroke.protocol.worker import Role

LAUNCH_FD_VARIABLE = "TWOSTROKE_LAUNCH_FD"
MAX_SPEC_BYTES = 60_000
"""A spec fits the pipe's buffer (64 KiB on Linux), so that writing it cannot block."""

_MAX_SOCKET_PATH = 107  # sun_path of sockaddr_un, less the final zero


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker world gets from its launcher.

    Attributes:
        epoch: Names this start of the worker.
        role: Which phases it runs.
        model: The model to serve.
        engine: The engine's section of the configuration.
        key: 32 bytes; authenticates the local queues.
        nonce: 16 bytes; part of the local queues' session.
        secret: The cluster secret, for frontends over TCP and KV transfer; None: neither.
        request_address: ZMQ address of the request queue (`ipc://...`); the worker binds all three.
        result_address: Of the result queue.
        init_address: Of the worker init status queue.
    """

    epoch: int
    role: Role
    model: ModelConfig
    engine: EngineConfig
    key: bytes
    nonce: bytes
    secret: bytes | None
    request_address: str
    result_address: str
    init_address: str

    def __repr__(self) -> str:
        """Without key, nonce and secret, so that no log holds them."""
        return f"LaunchSpec(epoch={self.epoch}, role={self.role}, model={self.model.path!r})"

    @classmethod
    def draw(
        cls, role: Role, model: ModelConfig, engine: EngineConfig, *, secret: bytes | None, directory: Path
    ) -> Self:
        """A spec for a new launch: fresh epoch, key and nonce, and queues in `directory` (the caller's own, mode 0700).

        Raises:
            ConfigError: The directory's path is too long for a local socket.
        """
        longest = directory / "request"
        if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
            raise ConfigError(f"the path {longest} is too long for a local socket; set TMPDIR to a shorter one")
        return cls(
            epoch=draw_epoch(),
            role=role,
            model=model,
            engine=engine,
            key=secrets.token_bytes(KEY_BYTES),
            nonce=secrets.token_bytes(NONCE_BYTES),
            secret=secret,
            request_address=f"ipc://{directory / 'request'}",
            result_address=f"ipc://{directory / 'result'}",
            init_address=f"ipc://{directory / 'init'}",
        )

    @property
    def session(self) -> Session:
        """What seals the messages of the local queues."""
        return Session(self.epoch, self.nonce, self.key)


def write_launch_spec(descriptor: int, spec: LaunchSpec) -> None:
    """Write `spec` into the pipe and close it.

    Raises:
        ConfigError: The spec is too large for the pipe.
        BrokenPipeError: The worker died before it could read.
    """
    payload = msgspec.msgpack.encode(spec)
    with os.fdopen(descriptor, "wb") as pipe:
        if len(payload) > MAX_SPEC_BYTES:
            raise ConfigError(f"the worker's configuration takes {len(payload)} bytes, over {MAX_SPEC_BYTES}")
        pipe.write(payload)


def read_launch_spec(environment: Mapping[str, str] = os.environ) -> LaunchSpec:
    """The spec from this process's launcher, with whom it dies from now on.

    Raises:
        ConfigError: This process was not started by a launcher.
        ProtocolError: The pipe held no spec, for example since the launcher died.
        SystemExit: The launcher is gone.
    """
    named, parent = environment.get(LAUNCH_FD_VARIABLE), environment.get(PARENT_PID_VARIABLE)
    if named is None or parent is None:
        raise ConfigError(
            f"{LAUNCH_FD_VARIABLE} is not set: a worker is started by its server, for example `twostroke serve`"
        )
    die_with_parent(int(parent))
    with os.fdopen(int(named), "rb") as pipe:
        payload = pipe.read(MAX_SPEC_BYTES + 1)
    try:
        return msgspec.msgpack.decode(payload, type=LaunchSpec)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the launch pipe held no launch spec ({len(payload)} bytes): {error}") from None
