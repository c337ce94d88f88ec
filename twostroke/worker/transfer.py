"""The KV transfer agent of a role's worker, from the worker's configuration."""

from typing import Any

import zmq

from kvtransfer.agent import TransferAgent
from kvtransfer.backend import BackendError, BlockBuffer, MemoryKind
from kvtransfer.options import BackendKind, SharedMemory, TransferOptions, TransferTimeouts
from twostroke.engine.interfaces import CacheDevice, QueuedWork
from twostroke.protocol.config import TransferConfig
from twostroke.protocol.errors import ConfigError
from twostroke.worker.role_part import RoleContext


def start_agent(context: RoleContext) -> TransferAgent:
    """Start the agent over the worker's whole KV cache.

    Raises:
        ConfigError: There is no secret, the control endpoint cannot be bound, or the transport cannot start.
    """
    if context.secret is None:
        raise ConfigError(
            f"security.secret_file: a {context.role} worker moves KV caches and needs the cluster's secret"
        )
    config = context.config.transfer
    memory = context.memory
    kind = MemoryKind.HOST if memory.gpu is None else MemoryKind.CUDA
    buffer = BlockBuffer(memory.address, memory.block_bytes, memory.num_blocks, memory.owner, kind)
    try:
        return TransferAgent(
            transfer_options(config, context.secret),
            epoch=context.epoch,
            layout=context.engine.facts.layout,
            buffer=buffer,
            wake=context.wake,
            device=None if memory.gpu is None else GpuSteps(memory.gpu),
        )
    except zmq.ZMQError as error:
        raise ConfigError(f"{context.role}.transfer.bind: cannot bind {config.bind}: {error}") from error
    except BackendError as error:
        raise ConfigError(f"{context.role}.transfer.backend: {config.backend} cannot start: {error}") from error


class GpuSteps:
    """A GPU as the transfer sees it: see `kvtransfer.device.MemoryDevice`.

    Args:
        gpu: The engine's.
    """

    def __init__(self, gpu: CacheDevice) -> None:
        self._gpu = gpu

    def enter_thread(self) -> None:
        """Make the GPU's context current: UCX copies in whichever it finds."""
        import torch  # noqa: PLC0415 - the engine has loaded it where there is a GPU

        device: Any = self._gpu.torch_device
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)

    def mark(self) -> QueuedWork:
        """The end of all steps that the engine has queued."""
        return self._gpu.event()


def transfer_options(config: TransferConfig, secret: bytes) -> TransferOptions:
    """The agent's settings that follow from a worker's configuration."""
    timeouts = TransferTimeouts()
    return TransferOptions(
        secret=secret,
        bind=config.bind,
        advertise=config.advertise,
        backend=BackendKind(config.backend.value),
        shared_memory=SharedMemory.CMA if config.shared_memory else SharedMemory.OFF,
        timeouts=TransferTimeouts(serve_s=max(timeouts.serve_s, config.timeout_s)),
    )
