"""From facts to findings, over made-up hosts."""

import msgspec
import pytest

from kvtransfer.backend import MemoryKind
from twostroke.cli.doctor.checks.gpu import check_gpus
from twostroke.cli.doctor.checks.host import check_host
from twostroke.cli.doctor.checks.model import check_gpu_memory, check_host_memory, check_model
from twostroke.cli.doctor.checks.settings import check_api_keys, check_cluster_secret, check_config
from twostroke.cli.doctor.checks.ucx import Route, check_binding, check_library, check_route
from twostroke.cli.doctor.facts import (
    Gpu,
    GpuFacts,
    HostFacts,
    ModelFacts,
    ProbeFault,
    Protocol,
    SecretFile,
    ServedModel,
    TransportFacts,
    UcxFacts,
)
from twostroke.cli.doctor.finding import Finding, Status, make_report
from twostroke.protocol.config import ClusterConfig, parse_config

GIB = 1 << 30
UCX = UcxFacts("1.21.0", "/site/libucx/lib/libucp.so", verbs=False)
H200 = Gpu("NVIDIA H200", "9.0", 140 * GIB, 139 * GIB)
MODEL = ServedModel("llama", 32, "bfloat16", 8192, 128256, weight_bytes=16 * GIB, block_bytes=2 << 20)
NEAR_HOST = Route(MemoryKind.HOST, across_hosts=False, shared_memory=False)
FAR_CUDA = Route(MemoryKind.CUDA, across_hosts=True, shared_memory=False)


def _only(findings: list[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


CPU_TORCH = GpuFacts("2.13+cpu", None)
CUDA_TORCH = GpuFacts("2.13", "13.0")
ONE_GPU = GpuFacts("2.13", "13.0", triton=True, gpus=(H200,))
TWO_GPUS = GpuFacts("2.13", "13.0", triton=True, gpus=(H200, H200))
ALL_CPU = parse_config({"context": {"device": "cpu"}, "generation": {"device": "cpu"}}, "test")
ASKS_FOR_CUDA = parse_config({"context": {"device": "cuda"}}, "test")


@pytest.mark.parametrize(
    ("facts", "devices", "status", "words"),
    [
        (CPU_TORCH, 0, Status.NOTE, "none; the engine runs on the CPU"),
        (CPU_TORCH, 2, Status.WARNING, "2 NVIDIA device files, but torch 2.13+cpu, built for CPUs, sees no GPU"),
        (CUDA_TORCH, 1, Status.WARNING, "torch 2.13, built for CUDA 13.0, sees no GPU"),
        (ONE_GPU, 1, Status.OK, "0: NVIDIA H200, sm_90, 139.0 GiB of 140.0 GiB free"),
        (ProbeFault("was ended by SIGSEGV"), 1, Status.PROBLEM, "asked torch for GPUs was ended by SIGSEGV"),
    ],
)
def test_gpus(facts: GpuFacts | ProbeFault, devices: int, status: Status, words: str) -> None:
    """None is no fault; a GPU that torch cannot use is, and so is a driver that kills whoever asks."""
    finding = check_gpus(facts, HostFacts(nvidia_devices=devices), ClusterConfig())[0]
    assert (finding.name, finding.status) == ("gpu.devices", status)
    assert words in finding.found
    assert bool(finding.todo) is (status in {Status.WARNING, Status.PROBLEM})


def test_what_the_configuration_asks_of_gpus() -> None:
    """`cuda` without a GPU cannot be served; with `cpu`, what is there is not used."""
    (absent,) = check_gpus(CPU_TORCH, HostFacts(), ASKS_FOR_CUDA)
    assert absent.status is Status.PROBLEM
    assert "set device: cpu" in absent.todo
    unused = _only(check_gpus(TWO_GPUS, HostFacts(), ALL_CPU), "gpu.kernels")
    assert unused.status is Status.NOTE
    without_triton = GpuFacts("2.13", "13.0", gpus=(H200,))
    assert _only(check_gpus(without_triton, HostFacts(), ClusterConfig()), "gpu.kernels").status is Status.PROBLEM


def test_peer_access() -> None:
    """Said where there are two GPUs or more; each pair that is cut off is named."""
    names = [finding.name for finding in check_gpus(ONE_GPU, HostFacts(), ClusterConfig())]
    assert names == ["gpu.devices", "gpu.kernels"]
    assert _only(check_gpus(TWO_GPUS, HostFacts(), ClusterConfig()), "gpu.peer_access").status is Status.OK
    cut = msgspec.structs.replace(TWO_GPUS, unreachable=((0, 1), (1, 0)))
    finding = _only(check_gpus(cut, HostFacts(), ClusterConfig()), "gpu.peer_access")
    assert finding.status is Status.WARNING
    assert "from 0 to 1, 1 to 0" in finding.found


def test_bindings() -> None:
    """One is well, none is a problem with a name to install, two overwrite each other."""
    assert check_binding(HostFacts(("ucxx-cu13 0.52.0",), "ucxx")).status is Status.OK
    nothing = check_binding(HostFacts())
    assert nothing.status is Status.PROBLEM
    assert "ucxx-cu13" in nothing.todo
    both = check_binding(HostFacts(("ucxx-cu13 0.52.0", "ucxx-cu12 0.52.0"), "ucxx"))
    assert both.status is Status.WARNING
    old = check_binding(HostFacts(("ucx-py-cu12 0.45.0",), "ucp"))
    assert "module ucp is used" in old.found


def test_library() -> None:
    """Version, place, and whether it knows InfiniBand; a library that does not load is a problem."""
    assert check_library(TransportFacts(UCX)).found == (
        "UCX 1.21.0 from /site/libucx/lib/libucp.so, without verbs (no InfiniBand, no RoCE)"
    )
    assert check_library(TransportFacts(error="no libucp")).status is Status.PROBLEM
    assert check_library(ProbeFault("was ended by SIGILL")).status is Status.PROBLEM


def test_host_memory_by_tcp_names_cma_and_its_price() -> None:
    """Unless it is allowed already."""
    facts = TransportFacts(UCX, Protocol("zero-copy", "tcp/lo"))
    finding = check_route(NEAR_HOST, facts)
    assert (finding.name, finding.status) == ("ucx.transports.host.same_host", Status.OK)
    assert "tcp over lo (zero-copy)" in finding.found
    assert "transfer.shared_memory: true" in finding.found
    allowed = Route(MemoryKind.HOST, across_hosts=False, shared_memory=True)
    assert "shared_memory" not in check_route(allowed, facts).found
    assert (
        "straight from process to process"
        in check_route(allowed, TransportFacts(UCX, Protocol("zero-copy", "cma/memory"))).found
    )


def test_cuda_memory_by_tcp_is_slow_and_a_warning() -> None:
    """Each block goes through host memory twice."""
    finding = check_route(FAR_CUDA, TransportFacts(UCX, Protocol("software emulation", "tcp/eth0")))
    assert (finding.name, finding.status) == ("ucx.transports.cuda.across_hosts", Status.WARNING)
    assert "copied to host memory, sent, and copied to the GPU: slow" in finding.found
    near = Route(MemoryKind.CUDA, across_hosts=False, shared_memory=False)
    assert check_route(near, TransportFacts(UCX, Protocol("zero-copy", "cuda_ipc/cuda"))).status is Status.OK
    staged = check_route(near, TransportFacts(UCX, Protocol("software emulation", "tcp/lo")))
    assert "expandable_segments" in staged.todo


def test_an_address_that_stays_on_this_host_is_said() -> None:
    """Whatever UCX could do across hosts."""
    route = Route(MemoryKind.HOST, across_hosts=True, shared_memory=False, bound_to_loopback="tcp://127.0.0.1:0")
    finding = check_route(route, TransportFacts(UCX, Protocol("zero-copy", "tcp/eth0")))
    assert finding.status is Status.NOTE
    assert "tcp over eth0" in finding.found
    assert "transfer.bind is tcp://127.0.0.1:0" in finding.found


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (TransportFacts(UCX, error="UCX could not start"), Status.PROBLEM),
        (ProbeFault("did not answer in 120 s and was killed"), Status.PROBLEM),
        (TransportFacts(UCX), Status.NOTE),
    ],
)
def test_blocks_that_did_not_travel(facts: TransportFacts | ProbeFault, status: Status) -> None:
    """A problem with its words; a block that arrived by unknown ways is none."""
    assert check_route(NEAR_HOST, facts).status is status


def test_rdma_devices_and_a_library_without_verbs() -> None:
    """What it would take, and that transfers use tcp in any case."""
    host = HostFacts(rdma_devices=("mlx5_0",), memlock=8 << 20)
    findings = check_host(host, UCX, 4096)
    rdma = _only(findings, "rdma.devices")
    assert rdma.status is Status.NOTE
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in rdma.found
    assert "use tcp between hosts" in rdma.todo
    assert "ulimit -l unlimited" in _only(findings, "limits.memlock").todo
    with_verbs = UcxFacts("1.18.0", "/usr/lib/libucp.so.0", verbs=True)
    assert _only(check_host(host, with_verbs, 4096), "rdma.devices").found == "mlx5_0"
    assert _only(check_host(HostFacts(), UCX, 4096), "rdma.devices").found == "none"


@pytest.mark.parametrize(
    ("open_files", "status"), [(None, Status.OK), (4608, Status.OK), (4607, Status.WARNING), (1024, Status.WARNING)]
)
def test_open_files(open_files: int | None, status: Status) -> None:
    """One for each connection of `frontend.max_in_flight`, and some to spare."""
    finding = _only(check_host(HostFacts(open_files=open_files), UCX, 4096), "limits.open_files")
    assert finding.status is status


@pytest.mark.parametrize(
    ("shared_memory", "status"), [(None, Status.NOTE), (64 << 20, Status.NOTE), (1 << 30, Status.OK)]
)
def test_shared_memory(shared_memory: int | None, status: Status) -> None:
    """A container's 64 MiB are said."""
    finding = _only(check_host(HostFacts(shared_memory=shared_memory), UCX, 1), "host.shared_memory")
    assert finding.status is status


def test_a_model_that_is_served() -> None:
    """Family and figures; a missing chat template is said."""
    folder, tokenizer = check_model("/m", ModelFacts(MODEL, vocabulary=128256, chat_template=True))
    assert folder.found == "/m: llama, 32 layers, bfloat16, 8192 positions; this family is served"
    assert (folder.status, tokenizer.status) == (Status.OK, Status.OK)
    assert check_model("/m", ModelFacts(MODEL, vocabulary=10))[1].status is Status.NOTE


def test_a_model_that_is_not() -> None:
    """The reason is passed on; a tokenizer of another model is suspicious."""
    folder, tokenizer = check_model("/m", ModelFacts(refusal="mamba has layers", tokenizer_error="no tokenizer.json"))
    assert (folder.status, tokenizer.status) == (Status.PROBLEM, Status.PROBLEM)
    assert "mamba has layers" in folder.found
    foreign = check_model("/m", ModelFacts(MODEL, vocabulary=200_000, chat_template=True))[1]
    assert foreign.status is Status.WARNING
    (crashed,) = check_model("/m", ProbeFault("was ended by SIGKILL"))
    assert crashed.status is Status.PROBLEM


@pytest.mark.parametrize(
    ("memory", "status"),
    [(64 * GIB, Status.OK), (34 * GIB, Status.WARNING), (17 * GIB, Status.PROBLEM), (None, Status.NOTE)],
)
def test_memory_of_the_host(memory: int | None, status: Status) -> None:
    """Two workers of 17.5 GiB: both fit, one fits, none fits, nobody knows."""
    finding = check_host_memory(MODEL, ClusterConfig(), HostFacts(memory=memory))
    assert (finding.name, finding.status) == ("model.memory", status)
    assert "a worker takes about 17.5 GiB (16.0 GiB of weights, KV cache for 8192 tokens)" in finding.found


def test_more_replicas_take_more_memory() -> None:
    """And a cache of so many blocks takes what they take."""
    document = {"generation": {"replicas": 3, "kv_cache": {"num_blocks": 1024}}}
    finding = check_host_memory(MODEL, parse_config(document, "test"), HostFacts(memory=64 * GIB))
    assert finding.status is Status.WARNING
    assert "the 4 of `twostroke up` 73.0 GiB" in finding.found


@pytest.mark.parametrize(
    ("free", "status"),
    [(139 * GIB, Status.OK), (17 * GIB, Status.WARNING), (16 * GIB, Status.PROBLEM)],
)
def test_memory_of_a_gpu(free: int, status: Status) -> None:
    """The KV cache should hold a sequence of the longest length; the GPU with the least memory decides."""
    gpus = (H200, Gpu("NVIDIA H200", "9.0", 140 * GIB, free))
    finding = check_gpu_memory(MODEL, ClusterConfig(), gpus)
    assert (finding.name, finding.status) == ("model.memory", status)


def test_configuration_and_its_files() -> None:
    """A wrong setting and a secret that cannot be read are problems; one that others may read is a warning."""
    assert check_config(None, "").status is Status.NOTE
    assert check_config("c.yaml", "").status is Status.OK
    assert check_config("c.yaml", "c.yaml: router.port: expected").status is Status.PROBLEM
    assert check_cluster_secret(None).status is Status.NOTE
    assert check_cluster_secret(SecretFile("s", 0o600)).status is Status.OK
    shared = check_cluster_secret(SecretFile("s", 0o644))
    assert shared.status is Status.WARNING
    assert "chmod 600 s" in shared.todo
    assert check_api_keys(SecretFile("k", error="cannot read k")).status is Status.PROBLEM


def test_only_problems_keep_a_host_from_serving() -> None:
    """Warnings do not."""
    findings = tuple(Finding(f"x.{status}", status, "") for status in (Status.OK, Status.NOTE, Status.WARNING))
    assert make_report("1", findings).can_serve
    assert not make_report("1", (*findings, Finding("x.y", Status.PROBLEM, ""))).can_serve
