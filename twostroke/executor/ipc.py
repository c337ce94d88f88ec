"""`IpcExecutor`: the default form on one host, a worker world in processes of its own.

    loading --ready--> serving --shutdown--> stopping --world ended--> ended
    loading --fails or shutdown--> ended                   (the world is ended first; `launch` raises)
    serving --world died, stopped, fell silent; a thread crashed--> ended   (all pending fail with `EngineDeadError`)

Two threads: the response thread starts the world, receives everything from it and watches its pidfd (it reads from
readiness on, since heartbeats come and death is noticed whether or not anything was submitted); the dispatch thread,
started by the first submit, sends everything. Neither is ever restarted. Callers may be threads or event loops.
"""

import atexit
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import structlog
import zmq

from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.executor.dispatcher import Dispatcher
from twostroke.executor.launcher import FAILED_WORLD_S, LaunchOptions, WorldLauncher
from twostroke.executor.pending import PendingResults
from twostroke.executor.world_process import WorldProcess
from twostroke.ipc.codec import request_codec
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.local_client import ResultReceiver
from twostroke.ipc.pauses import OwnPauses
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import EngineDeadError, OverloadedError, TwostrokeError
from twostroke.protocol.ids import LAUNCHING_FRONTEND, ClientIds, frontend_of
from twostroke.protocol.requests import Abort, Drain, GenerationRequest, RequestEnvelope, Shutdown, WorkerBound
from twostroke.protocol.responses import ResponseBatch, SequenceOutput
from twostroke.protocol.worker import Heartbeat, Role, WorkerDescription, WorkerLoad, WorkerStopping

_BURST = 256
_POLL_MS = 250
_LAST_RESULTS_MS = 50  # what a dead process sent may still be on its way through ZMQ
_EXIT_S = 5.0  # deadline of the shutdown at interpreter exit
_THREAD_S = 5.0

log = structlog.get_logger(__name__)


def _ignore_progress(_text: str) -> None:
    """Nobody waits for progress."""


class IpcExecutor(GenerationExecutor):
    """A launched worker world; make one with `launch`.

    Attributes:
        drops: Counts of messages dropped.
        load: From the worker's last heartbeat.
        step_age_s: Likewise: seconds since its engine loop last went round.
        ready: Resolves to the worker's description once it takes requests, or to the error of its start.
        died: Resolves to the fatal error (or to the reason of the shutdown) once the executor is dead. Threads wait for
            these two or add callbacks; loops use `asyncio.wrap_future`.
    """

    def __init__(
        self, module: str, spec: LaunchSpec, directory: Path, on_progress: Callable[[str], None], options: LaunchOptions
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._options = options
        self.drops = DropCounters()
        self.load = WorkerLoad()
        self.step_age_s = 0.0
        self.died: Future[EngineDeadError] = Future()
        self.died.set_running_or_notify_cancel()  # no waiter can cancel it for the others
        self._pending = PendingResults()
        self._client_ids = ClientIds(LAUNCHING_FRONTEND)
        self._codec = request_codec()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launcher = WorldLauncher(
            module, spec, self._context, on_progress=on_progress, options=options, drops=self.drops
        )
        self._dispatcher = Dispatcher(self._context, spec, options.limits, self._dispatch_crashed)
        self.ready: Future[WorkerDescription] = Future()
        self.ready.set_running_or_notify_cancel()
        self._process: WorldProcess | None = None
        self._stopping = threading.Event()
        self._shutdown_lock = threading.Lock()
        self._cleaned = False
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="response", daemon=True)

    @classmethod
    def launch(
        cls,
        module: str,
        role: Role,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        secret: bytes | None = None,
        on_progress: Callable[[str], None] = _ignore_progress,
        options: LaunchOptions | None = None,
    ) -> Self:
        """Start a world and wait until it is ready; blocks, so a loop calls `start` and awaits `ready` instead.

        Args:
            module: Python module that runs the world: `twostroke.worker`, or a role's own `worker`.
            role: Which phases it runs.
            model: The model to serve.
            engine: Its engine.
            secret: The cluster secret; with it, other frontends may attach over TCP.
            on_progress: Called on another thread with texts for people who wait.
            options: Deadlines and bounds.

        Raises:
            ConfigError: A setting or the model is at fault.
            EngineDeadError: The world failed, died or was not ready in time.
        """
        executor = cls.start(module, role, model, engine, secret=secret, on_progress=on_progress, options=options)
        try:
            executor.ready.result()
        except BaseException:
            executor.shutdown(FAILED_WORLD_S)
            raise
        return executor

    @classmethod
    def start(
        cls,
        module: str,
        role: Role,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        secret: bytes | None = None,
        on_progress: Callable[[str], None] = _ignore_progress,
        options: LaunchOptions | None = None,
    ) -> Self:
        """Start a world and return at once; `ready` tells how it went, and `shutdown` gives it up. As `launch` else."""
        directory = Path(tempfile.mkdtemp(prefix="twostroke-"))
        try:
            spec = LaunchSpec.draw(role, model, engine, secret=secret, directory=directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        executor = cls(module, spec, directory, on_progress, options or LaunchOptions())
        atexit.register(executor.shutdown, _EXIT_S)
        executor._thread.start()
        return executor

    @property
    def epoch(self) -> int:
        """The world's epoch."""
        return self._spec.epoch

    @property
    def description(self) -> WorkerDescription:
        """What the worker is and can do."""
        return self.ready.result()

    @property
    def model(self) -> ServedModel:
        """The served model."""
        return ServedModel.of(self.description)

    @property
    def pid(self) -> int | None:
        """Process id of rank 0; None before it was ready."""
        return None if self._process is None else self._process.pid

    @property
    def silence_s(self) -> float:
        """Seconds since the worker was last heard."""
        return time.monotonic() - self._heard_at

    @property
    def pending(self) -> int:
        """How many sequences are pending here."""
        return len(self._pending)

    def draw_client_id(self) -> int:
        """A client id for a new request of this frontend."""
        return self._client_ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """See `GenerationExecutor`; from any thread.

        Raises:
            OverloadedError: Also while the world is loading.
            ProtocolError: The request is too large to send.
        """
        if frontend_of(request.key.client_id) != LAUNCHING_FRONTEND:
            raise ValueError(f"client id of sequence {request.key} was not drawn by this executor")
        payload = self._encode(request)
        self._pending.submit(dict(zip(request.keys, sinks, strict=True)), lambda: self._dispatch(payload))

    def _dispatch(self, payload: bytes) -> None:
        if not self.ready.done():
            raise OverloadedError("the worker is still loading; try again later")
        self._dispatcher.put_request(payload)

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """See `GenerationExecutor`; from any thread."""
        self._pending.abort(client_id, index)
        self._control(Abort(client_id, index))

    def drain(self) -> None:
        """Have the worker take no new request and finish the running ones."""
        self._control(Drain())

    def _control(self, body: WorkerBound) -> None:
        if self._pending.error is not None:
            return
        try:
            self._dispatcher.put_control(self._encode(body))
        except EngineDeadError:
            return  # it died in this moment, and what was to be said with it
        except TwostrokeError as error:
            self._fail(EngineDeadError(f"the worker takes no messages any more: {error}"))
            self._abandon()

    def _encode(self, body: WorkerBound) -> bytes:
        return self._codec.encode(RequestEnvelope(self._spec.epoch, body))

    def check_health(self) -> Health:
        """How the world fares."""
        if self._pending.error is not None:
            return Health(HealthState.DEAD, str(self._pending.error))
        return Health(HealthState.READY if self.ready.done() else HealthState.STARTING)

    def shutdown(self, deadline_s: float | None = None) -> None:
        """End the world and everything that was made for it, within the deadline (default: `engine.shutdown_s`).

        Raises:
            RuntimeError: It was called by a callback of `ready` or `died`, on the thread that it waits for.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("shutdown waits for the response thread, so that one cannot call it")
        with self._shutdown_lock:
            if self._cleaned:
                return
            live = self._process is not None and self._pending.error is None
            wait_s = (self._spec.engine.shutdown_s if deadline_s is None else deadline_s) if live else FAILED_WORLD_S
            ends_at = time.monotonic() + wait_s
            self._stopping.set()
            self._launcher.cancel()
            if live:
                self._control(Shutdown(wait_s))
            self._fail(EngineDeadError("the executor was shut down"))
            self._thread.join(max(0.0, ends_at - time.monotonic()))
            self._abandon()
            self._thread.join(_THREAD_S)
            self._clean()

    def _abandon(self) -> None:
        """End a world that does not end by itself."""
        if self._process is not None and self._thread.is_alive():
            log.warning("killing a world that does not end", pid=self._process.pid)
            self._process.kill()

    def _clean(self) -> None:
        """Free what was made for the world. A thread that does not end keeps its sockets: that is not waited for."""
        self._dispatcher.close()
        if self._dispatcher.join(_THREAD_S) and not self._thread.is_alive():
            self._context.term()
            if self._process is not None:
                self._process.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.shutdown)
        self._cleaned = True

    def _fail(self, error: EngineDeadError) -> None:
        """Record the end, fail everything pending, tell whoever waits; the first call counts."""
        if self._pending.fail_all(error):
            if not self._stopping.is_set():
                log.error("the worker world is dead", reason=str(error), epoch=self._spec.epoch)
            self.died.set_result(error)

    def _dispatch_crashed(self, error: Exception) -> None:
        self._fail(EngineDeadError(f"the dispatch thread crashed: {error!r}"))
        self._abandon()
        log.error("the dispatch thread crashed", exc_info=error)

    # --- the response thread ---

    def _run(self) -> None:
        receiver: ResultReceiver | None = None
        try:
            # Connected before the world starts: it says that it is ready when its results have somebody to go to.
            receiver = ResultReceiver(self._context, self._spec, self._options.limits, self.drops)
            process, description = self._launcher.launch()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for readiness
            if receiver is not None:
                receiver.close()
            self._fail(EngineDeadError(str(error)))
            self.ready.set_exception(error)
            return
        self._process = process
        self._heard_at = time.monotonic()
        self.ready.set_result(description)
        try:
            self._fail(self._serve(process, receiver))
        except Exception as error:
            self._fail(EngineDeadError(f"the response thread crashed: {error!r}"))
            process.terminate()
            log.exception("the response thread crashed")  # printing a traceback takes time that waiters need not wait
        finally:
            receiver.close()
            self._dispatcher.close()
            process.end(FAILED_WORLD_S)

    def _serve(self, process: WorldProcess, receiver: ResultReceiver) -> EngineDeadError:
        """Receive until the world ends; returns why it did."""
        poller = zmq.Poller()
        poller.register(receiver.socket, zmq.POLLIN)
        poller.register(process.pidfd, zmq.POLLIN)
        pauses = OwnPauses(self._options.dead_after_s)
        while True:
            ended = process.pidfd in dict(poller.poll(_POLL_MS))
            if ended:
                while receiver.socket.poll(_LAST_RESULTS_MS):
                    self._receive(receiver)
                process.reap(FAILED_WORLD_S)
                return EngineDeadError(f"the worker died: {process.how_it_ended()}")
            stopped = self._receive(receiver)
            if stopped is not None and not self._stopping.is_set():
                return EngineDeadError(f"the worker stopped: {stopped}")
            now = time.monotonic()
            self._heard_at = min(now, self._heard_at + pauses.look(now))
            if self.silence_s > self._options.dead_after_s:
                process.kill()
                return EngineDeadError(f"the worker, pid {process.pid}, was silent for {self.silence_s:.1f} s")

    def _receive(self, receiver: ResultReceiver) -> str | None:
        """Handle one burst of messages; returns the reason if the worker says that it stops."""
        messages = receiver.receive(_BURST)
        if messages:
            self._heard_at = time.monotonic()
        outputs: list[SequenceOutput] = []
        stopped: str | None = None
        for message in messages:
            if isinstance(message, ResponseBatch):
                outputs += message.outputs
            elif isinstance(message, Heartbeat):
                self.load, self.step_age_s = message.load, message.step_age_s
            elif isinstance(message, WorkerStopping):
                stopped = message.reason
        if outputs:
            self.drops.count(DropReason.UNKNOWN_KEY, self._pending.deliver(outputs))
        return stopped
