"""What the probes found, as plain data: it crosses from a child process to the doctor, and tests make it up."""

import msgspec

from kvtransfer.backend import MemoryKind
from twostroke.protocol.config import ModelConfig


class ProbeFault(msgspec.Struct, frozen=True):
    """A probe that gave no answer: its process crashed, hung or failed.

    Attributes:
        what: What happened to it, in words.
    """

    what: str


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, as torch sees it.

    Attributes:
        name: The driver's name of it.
        capability: Compute capability, such as `9.0`.
        total_bytes: Its memory.
        free_bytes: What of it is free now.
    """

    name: str
    capability: str
    total_bytes: int
    free_bytes: int


class GpuFacts(msgspec.Struct, frozen=True):
    """What torch says of GPUs.

    Attributes:
        torch: Version of torch.
        cuda: CUDA version that torch was built for; None for a CPU build.
        triton: Whether Triton can be imported; the GPU's kernels are written in it.
        gpus: In torch's order.
        unreachable: Pairs (from, to) of GPUs that cannot read each other's memory.
    """

    torch: str
    cuda: str | None
    triton: bool = False
    gpus: tuple[Gpu, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = ()


class TransportQuestion(msgspec.Struct, frozen=True):
    """Which way would blocks take?

    Attributes:
        memory: Where they lie, on both sides.
        transports: What UCX may choose from.
        net_devices: UCX's network devices; None: all.
    """

    memory: MemoryKind
    transports: tuple[str, ...]
    net_devices: str | None


class UcxFacts(msgspec.Struct, frozen=True):
    """The UCX that is loaded.

    Attributes:
        version: Its own.
        library: Path of `libucp`.
        verbs: Whether it brings InfiniBand and RoCE.
    """

    version: str
    library: str
    verbs: bool


class Protocol(msgspec.Struct, frozen=True):
    """How UCX writes large blocks.

    Attributes:
        how: UCX's words: `zero-copy`, `software emulation`.
        by: Transport and device, such as `tcp/eth0`.
    """

    how: str
    by: str


class TransportFacts(msgspec.Struct, frozen=True):
    """What became of a block that one process wrote into another.

    Attributes:
        ucx: The library; None if it could not be loaded.
        protocol: What UCX chose; None if it did not say.
        error: Why the block did not arrive; "" if it did.
    """

    ucx: UcxFacts | None = None
    protocol: Protocol | None = None
    error: str = ""


class ModelQuestion(msgspec.Struct, frozen=True):
    """Can this model be served?

    Attributes:
        model: As configured, with a local folder.
        block_size: Tokens in a KV block.
    """

    model: ModelConfig
    block_size: int


class ServedModel(msgspec.Struct, frozen=True):
    """A model that can be served.

    Attributes:
        family: The model library's name of it.
        layers: Attention layers.
        dtype: Type that it would run in.
        max_model_len: Positions that would be served.
        vocab_size: Token ids that it knows.
        weight_bytes: Its weights in that type.
        block_bytes: One KV block.
    """

    family: str
    layers: int
    dtype: str
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    block_bytes: int


class ModelFacts(msgspec.Struct, frozen=True):
    """What a model's folder holds.

    Attributes:
        served: None if it is refused.
        refusal: Why.
        vocabulary: Tokens that the tokenizer knows.
        chat_template: Whether conversations can be rendered.
        tokenizer_error: Why the tokenizer does not load; "" if it does.
    """

    served: ServedModel | None = None
    refusal: str = ""
    vocabulary: int = 0
    chat_template: bool = False
    tokenizer_error: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """What the operating system says; sizes in bytes, None where it sets no limit or does not say.

    Attributes:
        bindings: UCX packages that are installed, with version.
        binding: Module that would be used; None without any.
        nvidia_devices: Device files of GPUs.
        rdma_devices: InfiniBand and RoCE adapters.
        net_devices: Network interfaces that are up, without loopback.
        memlock: Memory that a process may lock.
        open_files: Files that a process may have open.
        shared_memory: Size of /dev/shm; None if there is none.
        memory: What may be used now, the container's limit included.
    """

    bindings: tuple[str, ...] = ()
    binding: str | None = None
    nvidia_devices: int = 0
    rdma_devices: tuple[str, ...] = ()
    net_devices: tuple[str, ...] = ()
    memlock: int | None = None
    open_files: int | None = None
    shared_memory: int | None = None
    memory: int | None = None


class SecretFile(msgspec.Struct, frozen=True):
    """A file that holds a secret.

    Attributes:
        path: Where it is.
        mode: Its permission bits.
        error: Why it is of no use; "" if it is.
    """

    path: str
    mode: int = 0
    error: str = ""
