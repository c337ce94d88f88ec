"""The whole examination over made-up systems: which probes are asked what, and what is found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import pytest

from kvtransfer.backend import MemoryKind
from twostroke.cli.doctor.child import ChildProbe
from twostroke.cli.doctor.examine import MODEL_MODULE, TRANSPORT_MODULE, Patient, examine
from twostroke.cli.doctor.facts import (
    Gpu,
    GpuFacts,
    HostFacts,
    ModelFacts,
    ProbeFault,
    Protocol,
    ServedModel,
    TransportFacts,
    TransportQuestion,
    UcxFacts,
)
from twostroke.cli.doctor.finding import Finding, Status
from twostroke.protocol.config import ClusterConfig, parse_config

T = TypeVar("T")
GIB = 1 << 30
UCX = UcxFacts("1.21.0", "/site/libucp.so", verbs=False)
HOST = HostFacts(("ucxx-cu13 0.52.0",), "ucxx", net_devices=("eth0", "eth1"), memory=64 * GIB)
MODEL = ModelFacts(ServedModel("llama", 2, "float32", 512, 300, GIB, 1 << 20), vocabulary=300, chat_template=True)
TWO_GPUS = GpuFacts("2.13", "13.0", triton=True, gpus=(Gpu("H200", "9.0", 140 * GIB, 139 * GIB),) * 2)


@dataclass
class FakeSystem:
    """Answers in place of every child, and keeps what the transports were asked.

    Attributes:
        gpus: What torch would say.
        transports: UCX's choice among the transports that it may use, by the fastest one allowed.
        model: What the model's folder holds.
        asked: Transport questions, in order.
    """

    gpus: GpuFacts | ProbeFault = field(default_factory=lambda: GpuFacts("2.13+cpu", None))
    transports: Mapping[str, TransportFacts | ProbeFault] = field(
        default_factory=lambda: {
            name: TransportFacts(UCX, Protocol("zero-copy", by))
            for name, by in {"cuda_ipc": "cuda_ipc/cuda", "cma": "cma/memory", "tcp": "tcp/eth0"}.items()
        }
    )
    model: ModelFacts | ProbeFault = MODEL
    asked: list[TransportQuestion] = field(default_factory=list)

    async def run(self, probe: ChildProbe, answer: type[T]) -> T | ProbeFault:
        """What a child would have answered."""
        said: object = self.gpus
        if isinstance(probe.question, TransportQuestion):
            assert probe.module == TRANSPORT_MODULE
            self.asked.append(probe.question)
            allowed = probe.question.transports
            said = next(facts for name, facts in self.transports.items() if name in allowed)
        elif probe.module == MODEL_MODULE:
            said = self.model
        if isinstance(said, ProbeFault):
            return said
        return msgspec.json.decode(msgspec.json.encode(said), type=answer)


def _by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


async def test_a_host_without_gpu() -> None:
    """Everything but CUDA is looked at; blocks would stay on loopback as they are configured."""
    system = FakeSystem()
    found = _by_name(await examine(Patient(ClusterConfig(), HOST), system.run))
    assert list(found) == [
        "gpu.devices",
        "ucx.binding",
        "ucx.library",
        "ucx.transports.host.same_host",
        "ucx.transports.host.across_hosts",
        "rdma.devices",
        "limits.memlock",
        "limits.open_files",
        "host.shared_memory",
        "model.folder",
        "model.tokenizer",
        "model.memory",
    ]
    assert system.asked == [
        TransportQuestion(MemoryKind.HOST, ("tcp", "self"), "lo"),
        TransportQuestion(MemoryKind.HOST, ("tcp", "self"), "eth0,eth1"),
    ]
    assert all(finding.status in {Status.OK, Status.NOTE} for finding in found.values())


async def test_a_host_with_gpus_and_a_network() -> None:
    """CUDA memory travels by cuda_ipc within the host, and slowly beyond; cma where it is allowed, for host memory."""
    transfer = {"shared_memory": True, "bind": "tcp://10.0.0.1:7001"}
    config = parse_config({"context": {"transfer": transfer}}, "test")
    system = FakeSystem(gpus=TWO_GPUS)
    found = _by_name(await examine(Patient(config, HOST), system.run))
    assert {question.memory for question in system.asked[2:]} == {MemoryKind.CUDA}
    assert [question.net_devices for question in system.asked] == [None, "eth0,eth1", None, "eth0,eth1"]
    assert found["ucx.transports.host.same_host"].status is Status.OK
    assert "cma" in found["ucx.transports.host.same_host"].found
    assert "cuda_ipc" in found["ucx.transports.cuda.same_host"].found
    assert found["ucx.transports.cuda.across_hosts"].status is Status.WARNING
    assert "which leaves a KV cache" in found["model.memory"].found


async def test_gpus_that_no_role_computes_on() -> None:
    """Blocks lie in host memory then, and so must the model."""
    config = parse_config({"context": {"device": "cpu"}, "generation": {"device": "cpu"}}, "test")
    system = FakeSystem(gpus=TWO_GPUS)
    found = _by_name(await examine(Patient(config, HOST), system.run))
    assert {question.memory for question in system.asked} == {MemoryKind.HOST}
    assert "can be used" in found["model.memory"].found


async def test_a_driver_that_kills_whoever_asks_leaves_the_rest_standing() -> None:
    """And no question about CUDA memory is asked."""
    system = FakeSystem(gpus=ProbeFault("was ended by SIGSEGV"), model=ProbeFault("did not answer"))
    found = _by_name(await examine(Patient(ClusterConfig(), HOST), system.run))
    assert {name for name, finding in found.items() if finding.status is Status.PROBLEM} == {
        "gpu.devices",
        "model.folder",
    }
    assert len(system.asked) == 2


async def test_without_a_binding_nothing_travels() -> None:
    """One problem, not five."""
    system = FakeSystem()
    found = _by_name(await examine(Patient(ClusterConfig(), HostFacts(memory=64 * GIB)), system.run))
    assert [name for name, finding in found.items() if finding.status is Status.PROBLEM] == ["ucx.binding"]
    assert system.asked == []


@pytest.mark.parametrize(
    "said", [ProbeFault("was ended by SIGILL"), TransportFacts(error="the UCX binding ucxx is installed but broken")]
)
async def test_a_ucx_that_does_not_load_is_one_problem(said: TransportFacts | ProbeFault) -> None:
    """The routes are not judged."""
    found = _by_name(await examine(Patient(ClusterConfig(), HOST), FakeSystem(transports={"tcp": said}).run))
    assert [name for name, finding in found.items() if finding.status is Status.PROBLEM] == ["ucx.library"]
    assert not any(name.startswith("ucx.transports") for name in found)


async def test_a_host_without_a_network() -> None:
    """Nothing is sent anywhere beyond."""
    host = HostFacts(("ucxx-cu13 0.52.0",), "ucxx", memory=64 * GIB)
    system = FakeSystem()
    found = _by_name(await examine(Patient(ClusterConfig(), host), system.run))
    assert len(system.asked) == 1
    assert "no network interface" in found["ucx.transports.host.across_hosts"].found


async def test_a_model_elsewhere_is_not_looked_at() -> None:
    """The reason stands in the finding."""
    found = _by_name(await examine(Patient(ClusterConfig(), HOST, "org/m is no local folder"), FakeSystem().run))
    assert found["model.folder"] == Finding("model.folder", Status.NOTE, "org/m is no local folder")
    assert "model.memory" not in found


async def test_a_refused_model_keeps_the_host_from_serving() -> None:
    """Its memory is not estimated."""
    system = FakeSystem(model=ModelFacts(refusal="mamba has layers of type mamba", vocabulary=3))
    found = _by_name(await examine(Patient(ClusterConfig(), HOST), system.run))
    assert found["model.folder"].status is Status.PROBLEM
    assert "model.memory" not in found
