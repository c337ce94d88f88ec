"""What a worker's configuration means for its transfer agent."""

import dataclasses

import pytest

from kvtransfer.backend import BlockBuffer, MemoryKind
from kvtransfer.device import MemoryDevice
from kvtransfer.options import BackendKind, SharedMemory
from tests.support.fake_device import FakeFence
from tests.support.fake_runner import FakeRunner
from twostroke.engine.engine import Engine
from twostroke.protocol.config import EngineConfig, TransferBackend, TransferConfig
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.worker import Role
from twostroke.worker import transfer
from twostroke.worker.role_part import RoleContext
from twostroke.worker.transfer import start_agent, transfer_options

SECRET = bytes(32)


def make_context(config: EngineConfig, secret: bytes | None) -> RoleContext:
    """What a role part is built from, over an instant runner."""
    runner = FakeRunner()
    engine = Engine(runner, config, Role.CONTEXT)
    return RoleContext(
        role=Role.CONTEXT,
        engine=engine,
        epoch=1,
        config=config,
        secret=secret,
        memory=runner.cache,
        wake=lambda: None,
    )


def test_shared_memory_is_off_unless_asked_for() -> None:
    """With it a killed reader takes the writer along."""
    assert transfer_options(TransferConfig(), SECRET).shared_memory is SharedMemory.OFF
    assert transfer_options(TransferConfig(shared_memory=True), SECRET).shared_memory is SharedMemory.CMA


@pytest.mark.parametrize("backend", TransferBackend)
def test_every_backend_has_its_kind(backend: TransferBackend) -> None:
    """The configuration's names are the agent's."""
    assert transfer_options(TransferConfig(backend=backend), SECRET).backend is BackendKind(backend.value)


def test_a_transfer_may_be_served_for_as_long_as_readers_wait() -> None:
    """A longer `timeout_s` raises the agent's own limit."""
    assert transfer_options(TransferConfig(timeout_s=200.0), SECRET).timeouts.serve_s == 200.0


def test_a_role_needs_the_secret() -> None:
    """Handles are signed with it."""
    with pytest.raises(ConfigError, match=r"security\.secret_file: a context worker"):
        start_agent(make_context(EngineConfig(), None))


def test_an_address_that_cannot_be_bound_is_named() -> None:
    """With the setting at fault."""
    config = EngineConfig(transfer=TransferConfig(bind="tcp://203.0.113.1:7100", backend=TransferBackend.UCX))
    with pytest.raises(ConfigError, match=r"context\.transfer\.bind: cannot bind tcp://203\.0\.113\.1:7100"):
        start_agent(make_context(config, SECRET))


class FakeGpu:
    """A GPU whose events can be told apart."""

    torch_device = "cuda:3"

    def __init__(self) -> None:
        self.events: list[FakeFence] = []

    def event(self) -> FakeFence:
        """A new one."""
        self.events.append(FakeFence())
        return self.events[-1]


def test_memory_of_a_gpu_goes_with_the_events_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent is told the kind of the memory, and marks steps by the engine's own events."""
    made: list[tuple[BlockBuffer, MemoryDevice]] = []

    def make(*_: object, buffer: BlockBuffer, device: MemoryDevice, **__: object) -> None:
        made.append((buffer, device))

    monkeypatch.setattr(transfer, "TransferAgent", make)
    context = make_context(EngineConfig(), SECRET)
    gpu = FakeGpu()
    start_agent(dataclasses.replace(context, memory=dataclasses.replace(context.memory, gpu=gpu)))
    start_agent(context)
    (on_gpu, device), (on_host, no_device) = made
    assert on_gpu.kind is MemoryKind.CUDA
    assert device.mark() is gpu.events[0]
    assert not device.mark().reached()
    assert on_host.kind is MemoryKind.HOST
    assert no_device is None


def test_the_secret_stays_out_of_texts() -> None:
    """A context that ends up in a log shows no secret."""
    assert "secret" not in repr(make_context(EngineConfig(), SECRET))
