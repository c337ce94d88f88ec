"""What `up` will start: one configuration a part, with ports fixed before the first start.

A server that is restarted binds the same ports again, so that the router re-attaches to it.
"""

import os
from dataclasses import dataclass

import msgspec

from twostroke.cli.up.ports import PortPicker
from twostroke.protocol.config import ClusterConfig, EngineConfig, RouterConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.worker import Role

WORLD_STOPS_WITHIN_S = 5.0
_LOOPBACK = "127.0.0.1"
_WILDCARDS = ("0.0.0.0", "*", "::", "")  # noqa: S104  (recognised, not bound)


@dataclass(frozen=True)
class PartPlan:
    """One process.

    Attributes:
        name: `router`, `context-0`, ...
        command: Subcommand of `twostroke`.
        config: Its whole configuration.
        http: `http://host:port` where it will answer, as seen from this host.
    """

    name: str
    command: str
    config: ClusterConfig
    http: str


@dataclass(frozen=True)
class LaunchPlan:
    """All processes of one launch; the servers start first, together."""

    servers: tuple[PartPlan, ...]
    router: PartPlan


def make_plan(config: ClusterConfig, picker: PortPicker, secret_file: str, cores: int | None = None) -> LaunchPlan:
    """Plan the launch of `config`.

    Args:
        config: What the user asked for.
        picker: Chooses and claims ports.
        secret_file: The launch's secret.
        cores: CPU cores to share among the engines; None takes those that this process may use.

    Raises:
        ConfigError: A port is taken, an address has a form that `up` cannot start a server on, or the roles' KV caches
            do not fit each other.
    """
    _check_block_sizes(config)
    security = config.security
    if security.secret_file is None:
        security = msgspec.structs.replace(security, secret_file=secret_file)
    config = msgspec.structs.replace(config, security=security)
    engines = config.context.replicas + config.generation.replicas
    threads = max(1, (cores or len(os.sched_getaffinity(0))) // engines)
    router = _fix_router(config.router, picker)
    context = _servers(config, Role.CONTEXT, picker, threads)
    generation = _servers(config, Role.GENERATION, picker, threads)
    workers = msgspec.structs.replace(
        config.workers,
        context=config.workers.context + tuple(_worker_address(part.config.context) for part in context),
        generation=config.workers.generation + tuple(_worker_address(part.config.generation) for part in generation),
    )
    router_config = msgspec.structs.replace(config, router=router, workers=workers)
    return LaunchPlan(
        servers=context + generation,
        router=PartPlan("router", "router", router_config, _http_url(router.host, router.port)),
    )


def _check_block_sizes(config: ClusterConfig) -> None:
    """Blocks move from one cache to the other as they are; the router would refuse the second worker for ever."""
    ours, theirs = config.context.kv_cache.block_size, config.generation.kv_cache.block_size
    if ours != theirs:
        raise ConfigError(
            f"context.kv_cache.block_size is {ours}, generation.kv_cache.block_size is {theirs}: they must be the same"
        )


def _fix_router(router: RouterConfig, picker: PortPicker) -> RouterConfig:
    port = picker.claim(router.host, router.port, "router.port")
    wanted = router.admin_port
    if wanted is None:
        wanted = 0 if router.port == 0 else port + 1
    admin_port = picker.claim(router.admin_host, wanted, "router.admin_port")
    return msgspec.structs.replace(router, port=port, admin_port=admin_port)


def _servers(config: ClusterConfig, role: Role, picker: PortPicker, threads: int) -> tuple[PartPlan, ...]:
    engine = config.engine(role)
    parts = []
    for index in range(engine.replicas):
        fixed = _fix_engine(engine, role, index, picker, threads)
        whole = msgspec.structs.replace(config, **{role.value: fixed})
        parts.append(PartPlan(f"{role}-{index}", f"{role}-server", whole, _http_url(fixed.host, fixed.port)))
    return tuple(parts)


def _fix_engine(engine: EngineConfig, role: Role, index: int, picker: PortPicker, threads: int) -> EngineConfig:
    """The section of replica `index`: its own ports (a named port counts up), its share of the threads."""

    def nth(port: int) -> int:
        return port + index if port else 0

    transfer = msgspec.structs.replace(
        engine.transfer, bind=_fix_address(engine.transfer.bind, f"{role}.transfer.bind", index, picker)
    )
    return msgspec.structs.replace(
        engine,
        replicas=1,
        port=picker.claim(engine.host, nth(engine.port), f"{role}.port"),
        worker_bind=_fix_address(engine.worker_bind, f"{role}.worker_bind", index, picker),
        transfer=transfer,
        threads=engine.threads or threads,
        shutdown_s=min(engine.shutdown_s, WORLD_STOPS_WITHIN_S),
    )


def _fix_address(address: str, setting: str, index: int, picker: PortPicker) -> str:
    """`tcp://host:port` with a port that is fixed and free."""
    host, port = split_address(address, setting)
    return f"tcp://{host}:{picker.claim(host, port + index if port else 0, setting)}"


def split_address(address: str, setting: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`.

    Raises:
        ConfigError: It has another form.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise ConfigError(f"{setting}: expected tcp://host:port, got {address}")
    return host, int(port)


def _worker_address(engine: EngineConfig) -> str:
    """Where the router attaches, from this host."""
    host, port = split_address(engine.worker_bind, "worker_bind")
    return f"tcp://{engine.advertise or reachable(host)}:{port}"


def _http_url(host: str, port: int) -> str:
    return f"http://{reachable(host)}:{port}"


def reachable(host: str) -> str:
    """An address of this host that reaches a listener bound to `host`."""
    return _LOOPBACK if host in _WILDCARDS else host
