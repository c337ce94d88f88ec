"""A worker process, from its launch to its exit code.

    read the launch spec          dies with its launcher from here on
    bind the sockets, identify    the launcher watches this process from here on
    load the model                progress goes to the launcher
    ready                         frontends attach; the engine loop runs on this thread
    stopping                      shutdown or SIGTERM: finish, hand leases back, last message, exit 0
                                  crash: last message with the reason, exit 1

A start that fails is reported as one sentence, and exits with 2 where a setting or the model is at fault.
"""

import gc
import os
import signal
import socket
import sys
from types import FrameType

import msgspec
import structlog

from twostroke.engine.engine import Engine
from twostroke.ipc.endpoint import WorkerEndpoint
from twostroke.ipc.launch import LaunchSpec, read_launch_spec
from twostroke.ipc.logs import configure_logs
from twostroke.protocol.errors import ConfigError, ModelError, ProtocolError
from twostroke.protocol.worker import InitProgress, WorkerFailed, WorkerIdentity, WorkerReady
from twostroke.worker.engine_loop import EngineLoop
from twostroke.worker.inbox import Inbox, Terminate
from twostroke.worker.io_thread import IoThread
from twostroke.worker.loading import (
    LoadRunner,
    MakeEngine,
    describe_worker,
    load_constraint_compiler,
    load_model_runner,
)
from twostroke.worker.pulse import Pulse
from twostroke.worker.role_part import AggregatedPart, MakeRolePart, RoleContext

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2

FAREWELL_S = 2.0
"""How long the last messages of a worker that failed may take."""
REPORT_S = 15.0
"""How long the launcher may take to acknowledge a status, the endpoint's own deadline included."""


def run_worker(
    make_role_part: MakeRolePart | None = None,
    load_runner: LoadRunner = load_model_runner,
    make_engine: MakeEngine = Engine,
) -> int:
    """Run this process as the worker world that its launcher asks for.

    Args:
        make_role_part: Makes the role's part of a request's life; None for a worker that runs whole requests.
        load_runner: Loads the model.
        make_engine: Makes the engine around it.

    Returns:
        The process's exit code.
    """
    try:
        spec = read_launch_spec()
    except (ConfigError, ProtocolError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    configure_logs(f"{spec.role} worker")
    # A terminal's Ctrl-C reaches the launcher too, and that one ends its worker in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        endpoint = WorkerEndpoint(spec)
    except ConfigError as error:
        return _report_unbound(spec, error)
    return Worker(spec, endpoint, load_runner, make_engine, make_role_part or (lambda _: AggregatedPart())).run()


class Worker:
    """One worker world of one rank.

    Args:
        spec: What the launcher asks for.
        endpoint: The bound sockets.
        load_runner: Loads the model.
        make_engine: Makes the engine around it.
        make_role_part: Makes the role's part of a request's life.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        endpoint: WorkerEndpoint,
        load_runner: LoadRunner,
        make_engine: MakeEngine,
        make_role_part: MakeRolePart,
    ) -> None:
        self._spec = spec
        self._load_runner = load_runner
        self._make_engine = make_engine
        self._make_role_part = make_role_part
        self._address = endpoint.address
        self._inbox = Inbox(spec.engine.max_waiting)
        self._pulse = Pulse()
        self._io = IoThread(endpoint, spec.epoch, self._inbox, self._pulse)
        self._log = structlog.get_logger(__name__).bind(role=spec.role.value, epoch=spec.epoch)

    def run(self) -> int:
        """Load, serve until told to stop, and return the exit code."""
        self._io.start()
        signal.signal(signal.SIGTERM, _exit_while_loading)
        try:
            self._io.report(_identity(self._spec.epoch)).result(REPORT_S)
            loop = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
            return self._fail_to_start(error)
        signal.signal(signal.SIGTERM, self._terminate)
        try:
            loop.run()
            self._role_part.close(loop.closing_s / 2)
        except Exception as error:  # noqa: BLE001 - fatal whatever it is: all frontends are told, then the process ends
            return self._crash(error)
        return self._stop(loop)

    def _load(self) -> EngineLoop:
        """Everything up to the moment when the launcher knows that this worker is ready."""
        spec = self._spec
        runner = self._load_runner(spec.model, spec.engine, self._report_progress)
        engine = self._make_engine(runner, spec.engine, spec.role)
        self._role_part = self._make_role_part(
            RoleContext(
                role=spec.role,
                engine=engine,
                epoch=spec.epoch,
                config=spec.engine,
                secret=spec.secret,
                memory=runner.cache,
                wake=self._inbox.wake,
            )
        )
        loop = EngineLoop(
            engine=engine,
            role_part=self._role_part,
            epoch=spec.epoch,
            inbox=self._inbox,
            responder=self._io,
            pulse=self._pulse,
            compiler=load_constraint_compiler(spec.model, runner.facts),
        )
        self._pulse.beat(engine.load())
        description = describe_worker(engine, spec.role, spec.model, spec.engine, self._address)
        # The model library's objects, a million of them, live as long as the process: no collection needs to look at
        # them again, neither while tokens are made nor, for seconds, at exit.
        gc.collect()
        gc.freeze()
        self._io.serve(description)
        self._io.report(WorkerReady(spec.epoch, description)).result(REPORT_S)
        self._log.info("worker ready", blocks=description.num_blocks, address=self._address)
        return loop

    def _stop(self, loop: EngineLoop) -> int:
        if not self._io.stop("the worker was shut down", max(FAREWELL_S, loop.closing_s)):
            self._log.error("the I/O thread did not end in time")
            return EXIT_FAILED
        return EXIT_STOPPED

    def _crash(self, error: Exception) -> int:
        self._log.error("the worker crashed", exc_info=error)
        self._io.stop(f"the worker crashed: {error!r}", FAREWELL_S)
        return EXIT_FAILED

    def _fail_to_start(self, error: Exception) -> int:
        expected = isinstance(error, ConfigError | ModelError)
        message = str(error) if expected else repr(error)
        if not expected:
            self._log.error("the worker could not start", exc_info=error)
        try:
            self._io.report(WorkerFailed(self._spec.epoch, 0, message, expected)).result(REPORT_S)
        except (ProtocolError, TimeoutError):
            sys.stderr.write(f"{message}\n")
        self._io.stop(message, FAREWELL_S)
        return EXIT_CONFIG if expected else EXIT_FAILED

    def _report_progress(self, text: str) -> None:
        self._io.report(InitProgress(self._spec.epoch, text))

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        self._inbox.stop(Terminate(self._spec.engine.shutdown_s))


def _exit_while_loading(_signal: int, _frame: FrameType | None) -> None:
    """Nothing is owed to anybody before the worker is ready."""
    raise SystemExit(EXIT_STOPPED)


def _report_unbound(spec: LaunchSpec, error: ConfigError) -> int:
    """The TCP port could not be bound: say so on the local queues alone."""
    endpoint = WorkerEndpoint(msgspec.structs.replace(spec, secret=None))
    try:
        endpoint.report(_identity(spec.epoch))
        endpoint.report(WorkerFailed(spec.epoch, 0, str(error), wrong_setting=True))
    except ProtocolError:
        sys.stderr.write(f"{error}\n")
    finally:
        endpoint.close()
    return EXIT_CONFIG


def _identity(epoch: int) -> WorkerIdentity:
    """This process, as its launcher needs to know it."""
    with open("/proc/self/stat", encoding="ascii") as stat:  # noqa: PTH123 - `Path` adds nothing to a /proc file
        # The second field, the command's name in brackets, may hold blanks; field 22 is the 20th after it.
        start_time = int(stat.read().rpartition(")")[2].split()[19])
    return WorkerIdentity(rank=0, pid=os.getpid(), start_time=start_time, host=socket.gethostname(), epoch=epoch)
