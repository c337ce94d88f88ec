"""The in-process form: the engine runs on a thread of the caller's process.

For tests, debugging and the library face. Requests, aborts, errors and shutdown take the same way through `EngineLoop`
as in a worker process; only the sockets are missing. It runs whole requests (role `aggregated`).
"""

import atexit
import threading
from collections.abc import Callable
from typing import Self

import structlog

from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import Runner
from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.executor.pending import PendingResults
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import EngineDeadError, OverloadedError
from twostroke.protocol.ids import LAUNCHING_FRONTEND, ClientIds, draw_epoch
from twostroke.protocol.requests import Abort, GenerationRequest, Shutdown
from twostroke.protocol.responses import ResponseBatch
from twostroke.protocol.worker import Role, WorkerDescription, WorkerLoad
from twostroke.worker.engine_loop import EngineLoop
from twostroke.worker.inbox import Inbox, Received
from twostroke.worker.loading import MakeEngine, describe_worker, load_constraint_compiler, load_model_runner
from twostroke.worker.pulse import Pulse
from twostroke.worker.role_part import AggregatedPart

_EXIT_S = 5.0  # deadline of the shutdown at interpreter exit


class InProcessExecutor(GenerationExecutor):
    """An engine on a background thread, which starts with the first submit.

    Args:
        runner: The loaded model.
        model: What it was loaded from.
        config: The engine's section of the configuration.
        make_engine: Makes the engine around the model.
    """

    def __init__(
        self, runner: Runner, model: ModelConfig, config: EngineConfig, make_engine: MakeEngine = Engine
    ) -> None:
        self._config = config
        engine = make_engine(runner, config, Role.AGGREGATED)
        self.description: WorkerDescription = describe_worker(engine, Role.AGGREGATED, model, config, address="")
        self._client_ids = ClientIds(LAUNCHING_FRONTEND)
        self._pending = PendingResults()
        self._inbox = Inbox(config.max_waiting)
        self._pulse = Pulse()
        self._pulse.beat(engine.load())
        self._loop = EngineLoop(
            engine=engine,
            role_part=AggregatedPart(),
            epoch=draw_epoch(),
            inbox=self._inbox,
            responder=self,
            pulse=self._pulse,
            compiler=load_constraint_compiler(model, runner.facts),
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._starting = threading.Lock()
        self._log = structlog.get_logger(__name__)

    @classmethod
    def load(cls, model: ModelConfig, config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Self:
        """Load a model in this process; `progress` is told what is being done.

        Raises:
            ConfigError: A setting does not go with the model or the host.
            ModelError: The model cannot be served.
        """
        return cls(load_model_runner(model, config, progress), model, config)

    @property
    def model(self) -> ServedModel:
        """The served model."""
        return ServedModel.of(self.description)

    @property
    def worker_load(self) -> WorkerLoad:
        """How busy the engine is, as of its last step."""
        return self._pulse.load

    def draw_client_id(self) -> int:
        """A client id for a new request."""
        return self._client_ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """See `GenerationExecutor`."""
        self._pending.submit(dict(zip(request.keys, sinks, strict=True)), lambda: self._send(request))

    def _send(self, request: GenerationRequest) -> None:
        self._start()
        if not self._inbox.offer_request(Received(LAUNCHING_FRONTEND, request)):
            raise OverloadedError("the engine does not keep up with its requests; try again later")

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """See `GenerationExecutor`."""
        self._pending.abort(client_id, index)
        if not self._inbox.offer_control(Received(LAUNCHING_FRONTEND, Abort(client_id, index))):
            self._log.error("the engine thread is stuck; an abort was dropped", client_id=f"{client_id:016x}")

    def check_health(self) -> Health:
        """How the engine fares."""
        if self._pending.error is not None:
            return Health(HealthState.DEAD, str(self._pending.error))
        return Health(HealthState.READY)

    def shutdown(self, deadline_s: float | None = None) -> None:
        """Fail what is pending and end the engine thread."""
        deadline_s = self._config.shutdown_s if deadline_s is None else deadline_s
        self._pending.fail_all(EngineDeadError("the executor was shut down"))
        atexit.unregister(self.shutdown)
        if not self._thread.is_alive():
            return
        self._inbox.offer_control(Received(LAUNCHING_FRONTEND, Shutdown(deadline_s)))
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._log.error("the engine thread did not end in time and is abandoned", deadline_s=deadline_s)

    def respond(self, frontend_id: int, batch: ResponseBatch) -> None:
        """See `Responder`; on the engine thread. There is but one frontend."""
        del frontend_id
        unknown = self._pending.deliver(batch.outputs)
        if unknown:
            self._log.debug("dropped outputs of ended requests", outputs=unknown)

    def _start(self) -> None:
        """Start the engine thread once; after a crash it stays down."""
        with self._starting:
            if self._thread.ident is None:
                # A step that still runs while the interpreter is torn down would crash it.
                atexit.register(self.shutdown, _EXIT_S)
                self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - recorded, and told to everybody who waits
            self._log.error("the engine crashed", exc_info=error)
            self._pending.fail_all(EngineDeadError(f"the engine crashed: {error!r}"))
