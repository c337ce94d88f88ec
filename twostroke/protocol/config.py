"""The one YAML document that configures every part, checked at start.

    model: {path: /models/m, dtype: bfloat16}
    context: {replicas: 2, max_batched_tokens: 4096, kv_cache: {block_size: 16}}

Unknown keys, wrong types and values out of range are refused with their dotted path, for example
`generation.kv_cache.block_size: expected a whole number >= 1, got 0`. A worker's launcher sends it the same structs.
"""

import enum
from pathlib import Path
from typing import Annotated

import msgspec

from twostroke.protocol.config_faults import explain
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import MAX_N
from twostroke.protocol.worker import Role

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, and unknown keys are refused."""


class Dtype(enum.StrEnum):
    """Element type of weights, activations and KV cache. `AUTO` takes the model's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceKind(enum.StrEnum):
    """What an engine computes on. `AUTO` takes a GPU where there is one that torch can use, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class UseDefaults(enum.StrEnum):
    """Whether the model's `generation_config.json` gives sampling defaults; its end-of-sequence ids always count."""

    AUTO = "auto"
    IGNORE = "ignore"


class ToolFamily(enum.StrEnum):
    """The syntax of a model's tool calls. `AUTO` tells by the chat template."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA_JSON = "llama_json"


class ModelConfig(Config, frozen=True):
    """Which model is served.

    Attributes:
        path: Local Hugging Face folder, or a hub name (then, and only then, the hub is asked).
        served_name: Name in `/v1/models`; None takes the folder's name.
        dtype: Element type.
        max_model_len: Prompt and output tokens of a sequence at most; None takes the model's own limit.
        generation_config: Whether requests that leave sampling fields out get the model's own defaults.
    """

    path: str = ""
    served_name: str | None = None
    dtype: Dtype = Dtype.AUTO
    max_model_len: PositiveInt | None = None
    generation_config: UseDefaults = UseDefaults.AUTO

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or Path(self.path).name


class RoutingPolicy(enum.StrEnum):
    """How the router chooses among live workers of a role."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


class Schedule(enum.StrEnum):
    """When the KV cache travels. `CONTEXT_FIRST`: after the context phase."""

    CONTEXT_FIRST = "context_first"


class PolicyConfig(Config, frozen=True):
    """The routing policy of each role."""

    context: RoutingPolicy = RoutingPolicy.LEAST_LOADED
    generation: RoutingPolicy = RoutingPolicy.LEAST_LOADED


class RouterConfig(Config, frozen=True):
    """The router's HTTP endpoint and dispatch.

    Attributes:
        host: Address of the public port.
        port: Public port; 0 takes a free one and prints it.
        admin_host: Address of the admin port.
        admin_port: None is public + 1.
        policy: Choice of workers.
        schedule: When the KV cache travels.
        max_attempts: How often a context phase is placed before the request fails.
        max_queued: Requests waiting for a worker at most; more are refused with 503.
        request_timeout_s: A request that takes longer ends with 504, under `twostroke serve` too.
        suspect_after_s: A worker silent for so long gets no new work.
        dead_after_s: A worker silent for so long is dead.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Port | None = None
    policy: PolicyConfig = PolicyConfig()
    schedule: Schedule = Schedule.CONTEXT_FIRST
    max_attempts: PositiveInt = 3
    max_queued: PositiveInt = 2048
    request_timeout_s: PositiveFloat = 600.0
    suspect_after_s: PositiveFloat = 2.0
    dead_after_s: PositiveFloat = 5.0


class KVCacheConfig(Config, frozen=True):
    """The paged KV cache of one rank.

    Attributes:
        block_size: Tokens in a block.
        num_blocks: Blocks; None sizes the cache by memory.
        memory_fraction: Share of free GPU memory for the cache (GPU only).
        cpu_memory_gib: Size of the cache on a host without GPU.
        prefix_caching: Keep the blocks of ended sequences for prompts with the same start.
        max_leased_share: Leased blocks, as a share of the cache, above which a context worker stops admitting.
        max_reserved_share: Reserved blocks, as a share of the cache, above which hand-overs wait.
    """

    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    memory_fraction: Share = 0.85
    cpu_memory_gib: PositiveFloat = 1.0
    prefix_caching: bool = True
    max_leased_share: Share = 0.5
    max_reserved_share: Share = 0.5


class TransferBackend(enum.StrEnum):
    """What moves KV blocks. `LOOPBACK` works within one process and serves tests."""

    UCX = "ucx"
    LOOPBACK = "loopback"


class TransferConfig(Config, frozen=True):
    """How KV blocks travel between workers.

    Attributes:
        backend: The mover.
        bind: ZMQ address of a context worker's control endpoint; port 0 takes a free one.
        advertise: Host that other workers reach this one by; None takes the bind address's host, or the host name's
            address where that is a wildcard.
        shared_memory: Let UCX use cma within a host: faster, but killing the reader aborts the writer.
        lease_s: Blocks of a finished context phase wait so long for their reader.
        timeout_s: A transfer that takes longer fails.
    """

    backend: TransferBackend = TransferBackend.UCX
    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    shared_memory: bool = False
    lease_s: PositiveFloat = 60.0
    timeout_s: PositiveFloat = 30.0


class EngineConfig(Config, frozen=True):
    """One engine and the server around it; the roles differ only in defaults.

    Attributes:
        replicas: How many servers `twostroke up` starts, and the chart's replica count.
        tensor_parallel: Ranks of one worker; 1 for now.
        device: What the engine computes on: `auto` takes a GPU where torch sees one, else the CPU; `cpu`; `cuda`.
        max_batched_tokens: Token budget of one engine step.
        max_sequences: Sequences in a batch at most.
        max_waiting: Requests waiting for admission at most; more are refused with 503.
        threads: CPU threads of the engine; None takes all cores (shared out under `twostroke up`).
        host: Address of the server's HTTP port.
        port: HTTP port of the first replica; 0 takes a free one.
        worker_bind: ZMQ address where frontends attach; port 0 takes a free one.
        advertise: Host that frontends reach `worker_bind` by; None takes its own host.
        shutdown_s: How long a live worker may take to end.
        kv_cache: The paged KV cache.
        transfer: KV transfer.
    """

    replicas: PositiveInt = 1
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    device: DeviceKind = DeviceKind.AUTO
    max_batched_tokens: PositiveInt = 2048
    max_sequences: PositiveInt = 64
    max_waiting: PositiveInt = 4096
    threads: PositiveInt | None = None
    host: str = "127.0.0.1"
    port: Port = 0
    worker_bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    shutdown_s: PositiveFloat = 180.0
    kv_cache: KVCacheConfig = KVCacheConfig()
    transfer: TransferConfig = TransferConfig()


class FrontendConfig(Config, frozen=True):
    """How clients are served, by the router and by `twostroke serve` alike.

    Attributes:
        max_in_flight: Choices being made at most; more are refused with 429.
        max_n: Choices that one request may ask for with `n`, of each of its prompts.
        max_body_bytes: Length of a request's body at most; longer ones are refused with 413.
        keep_alive_s: A stream that is silent for so long (a long prefill) gets a comment, so that no proxy cuts it.
        allow_chat_template: Requests may bring a chat template of their own. Templates are programs: they run in a
            sandbox, but may still use much time and memory.
        tool_family: The syntax of the model's tool calls, where its chat template does not tell.
    """

    max_in_flight: PositiveInt = 4096
    max_n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 128
    max_body_bytes: PositiveInt = 8 << 20
    keep_alive_s: PositiveFloat = 15.0
    allow_chat_template: bool = False
    tool_family: ToolFamily = ToolFamily.AUTO


class WorkersConfig(Config, frozen=True):
    """Workers that the router attaches to, where it (or `up`) did not start them.

    Attributes:
        context: Addresses `tcp://host:port`, or `dns://name:port` for every address behind a headless service's name.
        generation: Likewise.
    """

    context: tuple[str, ...] = ()
    generation: tuple[str, ...] = ()


class SecurityConfig(Config, frozen=True):
    """Secrets, by file so that none stands in a process list or in this document.

    Attributes:
        secret_file: 32 random bytes as 64 hex digits, the same for all parts of one cluster. `twostroke up` makes one.
        api_keys_file: One API key a line; clients send one as a bearer token. None asks for none.
    """

    secret_file: str | None = None
    api_keys_file: str | None = None


class ClusterConfig(Config, frozen=True):
    """The whole document."""

    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    context: EngineConfig = EngineConfig()
    generation: EngineConfig = EngineConfig()
    aggregated: EngineConfig = EngineConfig(port=8000)
    frontend: FrontendConfig = FrontendConfig()
    workers: WorkersConfig = WorkersConfig()
    security: SecurityConfig = SecurityConfig()

    def engine(self, role: Role) -> EngineConfig:
        """The section of `role`."""
        if role is Role.CONTEXT:
            return self.context
        return self.generation if role is Role.GENERATION else self.aggregated


def parse_config(document: object, source: str) -> ClusterConfig:
    """Check a loaded YAML document.

    Args:
        document: What a YAML loader returned; None (an empty file) means all defaults.
        source: File name for messages.

    Raises:
        ConfigError: With the dotted path of the first wrong setting.
    """
    settings = {} if document is None else document
    try:
        return msgspec.convert(settings, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(str(error), settings, ClusterConfig)}") from None
