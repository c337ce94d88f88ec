"""The examination: asks every probe, in parallel where none waits for another, and checks what they found."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory, TransferOptions
from kvtransfer.transports import allowed_transports
from twostroke.cli.doctor.checks.gpu import check_gpus, on_gpu
from twostroke.cli.doctor.checks.host import check_host
from twostroke.cli.doctor.checks.model import check_gpu_memory, check_host_memory, check_model, no_model
from twostroke.cli.doctor.checks.ucx import Route, check_binding, check_library, check_route, unreachable_route
from twostroke.cli.doctor.child import ChildProbe, RunProbe
from twostroke.cli.doctor.facts import (
    Gpu,
    GpuFacts,
    HostFacts,
    ModelFacts,
    ModelQuestion,
    ProbeFault,
    TransportFacts,
    TransportQuestion,
    UcxFacts,
)
from twostroke.cli.doctor.finding import Finding
from twostroke.protocol.config import ClusterConfig

GPU_PROBE = ChildProbe("twostroke.cli.doctor.gpu_probe", deadline_s=120)
TRANSPORT_MODULE = "twostroke.cli.doctor.transport_probe"
MODEL_MODULE = "twostroke.cli.doctor.model_probe"
_TRANSPORT_DEADLINE_S = 120.0
_MODEL_DEADLINE_S = 180.0
_LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined.

    Attributes:
        config: The configuration that would be run; its model is a local folder, unless `model_note` says why not.
        host: What was found out about this host.
        model_note: Why no model is looked at; "" if one is.
    """

    config: ClusterConfig
    host: HostFacts
    model_note: str = ""


@dataclass(frozen=True, slots=True)
class _Travelled:
    """What became of a block on one route; None where there is no network to send it over."""

    route: Route
    facts: TransportFacts | ProbeFault | None


async def examine(patient: Patient, run: RunProbe) -> list[Finding]:
    """All findings about GPUs, UCX, this host and the model."""
    async with asyncio.TaskGroup() as tasks:
        asked_gpus = tasks.create_task(run(GPU_PROBE, GpuFacts))
        asked_model = tasks.create_task(_ask_model(patient, run))
        asked_routes = tasks.create_task(_ask_routes(MemoryKind.HOST, patient, run))
    gpus, model, travelled = asked_gpus.result(), asked_model.result(), asked_routes.result()
    used_gpus = gpus.gpus if isinstance(gpus, GpuFacts) and on_gpu(patient.config) else ()
    if used_gpus:
        travelled += await _ask_routes(MemoryKind.CUDA, patient, run)
    return [
        *check_gpus(gpus, patient.host, patient.config),
        check_binding(patient.host),
        *_check_ucx(travelled),
        *check_host(patient.host, _loaded_ucx(travelled), patient.config.frontend.max_in_flight),
        *_check_model(patient, model, used_gpus),
    ]


async def _ask_model(patient: Patient, run: RunProbe) -> ModelFacts | ProbeFault | None:
    if patient.model_note:
        return None
    question = ModelQuestion(patient.config.model, patient.config.context.kv_cache.block_size)
    return await run(ChildProbe(MODEL_MODULE, _MODEL_DEADLINE_S, question), ModelFacts)


async def _ask_routes(memory: MemoryKind, patient: Patient, run: RunProbe) -> list[_Travelled]:
    """Let a block travel both within this host and as it would to another one."""
    if patient.host.binding is None:
        return []
    transfer = patient.config.context.transfer
    shared_memory = SharedMemory.CMA if transfer.shared_memory else SharedMemory.OFF
    allowed = allowed_transports(memory, shared_memory)
    devices = TransferOptions(b"", bind=transfer.bind).ucx_devices()
    outward = ",".join(patient.host.net_devices)
    bound = transfer.bind if devices == _LOOPBACK else None
    near = Route(memory, across_hosts=False, shared_memory=transfer.shared_memory)
    far = Route(memory, across_hosts=True, shared_memory=transfer.shared_memory, bound_to_loopback=bound)
    return list(
        await asyncio.gather(
            _ask_route(near, TransportQuestion(memory, allowed.names, devices), run),
            _ask_route(far, TransportQuestion(memory, allowed.across_hosts().names, outward), run),
        )
    )


async def _ask_route(route: Route, question: TransportQuestion, run: RunProbe) -> _Travelled:
    if question.net_devices == "":
        return _Travelled(route, None)
    probe = ChildProbe(TRANSPORT_MODULE, _TRANSPORT_DEADLINE_S, question)
    return _Travelled(route, await run(probe, TransportFacts))


def _check_ucx(travelled: Sequence[_Travelled]) -> list[Finding]:
    if not travelled or travelled[0].facts is None:
        return []
    first = travelled[0].facts
    if not isinstance(first, TransportFacts) or first.ucx is None:
        return [check_library(first)]
    routes = [
        unreachable_route(one.route) if one.facts is None else check_route(one.route, one.facts) for one in travelled
    ]
    return [check_library(first), *routes]


def _loaded_ucx(travelled: Sequence[_Travelled]) -> UcxFacts | None:
    return next((one.facts.ucx for one in travelled if isinstance(one.facts, TransportFacts)), None)


def _check_model(patient: Patient, facts: ModelFacts | ProbeFault | None, gpus: tuple[Gpu, ...]) -> list[Finding]:
    if facts is None:
        return [no_model(patient.model_note)]
    findings = check_model(patient.config.model.path, facts)
    if isinstance(facts, ModelFacts) and facts.served is not None:
        fits = check_gpu_memory(facts.served, patient.config, gpus) if gpus else None
        findings.append(fits or check_host_memory(facts.served, patient.config, patient.host))
    return findings
