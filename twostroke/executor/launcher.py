"""`WorldLauncher`: starts a worker world and sees it through until it is ready.

    start                   the process runs; it gets its spec
    identity                from here on its death is reported with its rank and pid
    progress (any number)   forwarded to whoever waits
    ready | failed | ended | load deadline | cancelled

Death is noticed by pidfd, polled together with the init status queue. In all cases but `ready` the world is ended first
and the error raised afterwards.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq

from twostroke.executor.world_process import WorldProcess
from twostroke.ipc.drops import DropCounters
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.local_client import InitStatusReceiver
from twostroke.ipc.sockets import Context, QueueLimits, Wake
from twostroke.protocol.errors import ConfigError, EngineDeadError
from twostroke.protocol.worker import (
    InitProgress,
    InitStatus,
    WorkerDescription,
    WorkerFailed,
    WorkerIdentity,
    WorkerReady,
)

FAILED_WORLD_S = 5.0
"""How long a world that failed may take to end by itself."""

_LAST_WORDS_MS = 50  # what a dead process sent may still be on its way through ZMQ

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Deadlines and bounds of a launched world.

    Attributes:
        load_s: How long the world may take to become ready.
        dead_after_s: A world silent for so long is dead. Its death is noticed at once; this is for one that hangs.
        limits: Bounds of the local queues.
    """

    load_s: float = 600.0
    dead_after_s: float = 30.0
    limits: QueueLimits = field(default_factory=QueueLimits)


class WorldLauncher:
    """Starts one world. Used by one thread, which has to live as long as the world; `cancel` from any.

    Args:
        module: Python module to run, for example `twostroke.worker`.
        spec: What the world is told.
        context: ZMQ context of the local queues.
        on_progress: Called with the texts of `InitProgress`.
        options: Deadlines and bounds.
        drops: Counts what is dropped.
    """

    def __init__(
        self,
        module: str,
        spec: LaunchSpec,
        context: Context,
        *,
        on_progress: Callable[[str], None],
        options: LaunchOptions,
        drops: DropCounters,
    ) -> None:
        self._module = module
        self._spec = spec
        self._context = context
        self._on_progress = on_progress
        self._options = options
        self._drops = drops
        self._cancel = Wake()
        self.identity: WorkerIdentity | None = None

    def cancel(self) -> None:
        """Make `launch` end the world and raise; nothing happens once it is ready."""
        self._cancel.set()

    def launch(self) -> tuple[WorldProcess, WorkerDescription]:
        """Start the world and wait until it is ready.

        Raises:
            ConfigError: The world says that a setting or the model is at fault.
            EngineDeadError: It failed, died, took too long or was cancelled; the message says which.
        """
        init = InitStatusReceiver(self._context, self._spec, self._options.limits, self._drops)
        try:
            process = WorldProcess(self._module, self._spec)
            log.info("world started", module=self._module, pid=process.pid, epoch=self._spec.epoch)
            try:
                return process, self._await_ready(process, init)
            except BaseException:
                process.end(0.0)
                process.close()
                raise
        finally:
            init.close()
            self._cancel.close()

    def _await_ready(self, process: WorldProcess, init: InitStatusReceiver) -> WorkerDescription:
        poller = zmq.Poller()
        for readable in (init.socket, process.pidfd, self._cancel.descriptor):
            poller.register(readable, zmq.POLLIN)
        ends_at = time.monotonic() + self._options.load_s
        while (remaining := ends_at - time.monotonic()) > 0:
            ready = dict(poller.poll(int(remaining * 1000) + 1))
            if self._cancel.descriptor in ready:
                raise EngineDeadError("the executor was shut down while its worker was loading")
            ended = process.pidfd in ready
            while init.socket.poll(_LAST_WORDS_MS if ended else 0):
                description = self._handle(init.receive(), process)
                if description is not None:
                    return description
            if ended:
                process.reap(FAILED_WORLD_S)
                raise EngineDeadError(f"the worker died while loading: {process.how_it_ended()}")
        raise EngineDeadError(
            f"the worker, rank {process.rank} (pid {process.pid}), was not ready within {self._options.load_s:g} s"
        )

    def _handle(self, status: InitStatus | None, process: WorldProcess) -> WorkerDescription | None:
        """Take one status in; returns the description once the world is ready."""
        if isinstance(status, WorkerIdentity):
            self.identity = status
            log.info("worker identified itself", rank=status.rank, pid=status.pid, host=status.host)
        elif isinstance(status, InitProgress):
            self._on_progress(status.text)
        elif isinstance(status, WorkerFailed):
            process.end(FAILED_WORLD_S)
            kind = ConfigError if status.wrong_setting else EngineDeadError
            raise kind(f"the worker could not start (rank {status.rank}): {status.message}")
        elif isinstance(status, WorkerReady):
            return status.description
        return None
