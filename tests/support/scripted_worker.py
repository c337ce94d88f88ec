"""A worker without an engine: answers every request with tokens that anyone can foretell.

Output token number `offset` of a prompt is `(sum(prompt) + offset) % VOCABULARY`. The first prompt token may be one of
`Act`: then the worker does that instead. `python -m tests.support.scripted_worker` runs a whole process; the name of
the model scripts its start (`Script`).
"""

import enum
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.ipc.endpoint import EndpointOptions, FrontendLost, Inbound, WorkerEndpoint
from twostroke.ipc.launch import LaunchSpec, read_launch_spec
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import Abort, Drain, GenerationRequest, Phase, Shutdown
from twostroke.protocol.responses import FinishReason, ResponseBatch, SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens, token_count, unpack_tokens
from twostroke.protocol.transfer import LayoutFingerprint
from twostroke.protocol.worker import (
    Heartbeat,
    InitProgress,
    WorkerDescription,
    WorkerFailed,
    WorkerIdentity,
    WorkerLoad,
    WorkerReady,
    WorkerStopping,
)

VOCABULARY = 1000
STEP_S = 0.001
HEARTBEAT_S = 0.25


class Act(enum.IntEnum):
    """First prompt tokens that make the worker misbehave."""

    HANG = 900
    KILL_ITSELF = 901
    FINISH_AND_KILL_ITSELF = 902
    STOP = 903
    FREEZE = 904


class Script(enum.StrEnum):
    """Model names that script the start of a worker process."""

    NORMAL = "normal"
    FAIL = "fail"
    DIE_EARLY = "die-early"
    DIE_LOADING = "die-loading"
    LOAD_FOREVER = "load-forever"
    IGNORE_SHUTDOWN = "ignore-shutdown"


def expected_tokens(prompt: Sequence[int], count: int, start: int = 0) -> list[int]:
    """What a scripted worker makes of `prompt`."""
    return [(sum(prompt) + offset) % VOCABULARY for offset in range(start, start + count)]


def make_request(key: SequenceKey, prompt: Sequence[int], max_tokens: int = 4) -> GenerationRequest:
    """A plain request."""
    return GenerationRequest(
        key=key, prompt_ids=pack_tokens(prompt), sampling=SamplingParams(max_tokens=max_tokens), phase=Phase.FULL
    )


def describe(spec: LaunchSpec, address: str) -> WorkerDescription:
    """What a scripted worker says of itself."""
    return WorkerDescription(
        role=spec.role,
        model=spec.model.name,
        max_model_len=4096,
        vocab_size=VOCABULARY,
        eos_token_ids=(2,),
        num_blocks=64,
        max_sequences=8,
        layout=LayoutFingerprint("fake", "float32", 16, 1, 1, 8),
        address=address,
    )


@dataclass(slots=True)
class _Running:
    frontend_id: int
    request: GenerationRequest
    made: int = 0


class ScriptedWorker:
    """Serves an endpoint until told to stop. `run` belongs to one thread; the counts are read by tests.

    Attributes:
        frozen: Set by a test to make `run` leave the endpoint alone.
        parked: Whether it does.
    """

    def __init__(self, spec: LaunchSpec, options: EndpointOptions | None = None) -> None:
        self.spec = spec
        self.endpoint = WorkerEndpoint(spec, options or EndpointOptions())
        self.address = self.endpoint.address
        self.running: dict[SequenceKey, _Running] = {}
        self.aborts: list[Abort] = []
        self.lost: list[int] = []
        self.draining = False
        self.submitted = 0
        self.frozen = threading.Event()
        self.parked = threading.Event()
        self._stop = threading.Event()
        self._beat_at = 0.0

    def stop(self) -> None:
        """Make `run` return; from any thread."""
        self._stop.set()
        self.endpoint.wake()

    def run(self) -> None:
        """Serve, then say goodbye."""
        self.endpoint.describe(describe(self.spec, self.address))
        while not self._stop.is_set():
            if self.frozen.is_set():
                self.parked.set()
                time.sleep(0.01)
                continue
            self.parked.clear()
            for event in self.endpoint.poll(STEP_S if self.running else 0.05):
                self._handle(event)
            self._heartbeat()
            self._step()
        self.endpoint.broadcast(WorkerStopping(self.spec.epoch, "the scripted worker was told to stop"))
        time.sleep(0.05)  # lets ZMQ put the farewell on the wire
        self.endpoint.close()

    def _handle(self, event: Inbound | FrontendLost) -> None:
        if isinstance(event, FrontendLost):
            self.lost.append(event.frontend_id)
            self._forget(lambda entry: entry.frontend_id == event.frontend_id)
            return
        body = event.body
        if isinstance(body, GenerationRequest):
            self.submitted += 1
            self._admit(_Running(event.frontend_id, body, token_count(body.generated_ids)))
        elif isinstance(body, Abort):
            self.aborts.append(body)
            self._forget(
                lambda entry: (
                    entry.request.key.client_id == body.client_id and body.index in (None, entry.request.key.index)
                )
            )
        elif isinstance(body, Drain):
            self.draining = True
        elif isinstance(body, Shutdown) and self.spec.model.name != Script.IGNORE_SHUTDOWN:
            self._stop.set()

    def _forget(self, matches: object) -> None:
        assert callable(matches)
        for key in [key for key, entry in self.running.items() if matches(entry)]:
            del self.running[key]

    def _admit(self, entry: _Running) -> None:
        first = unpack_tokens(entry.request.prompt_ids)[0]
        if first == Act.KILL_ITSELF:
            os.kill(os.getpid(), signal.SIGKILL)
        elif first == Act.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif first == Act.STOP:
            self._stop.set()
        elif first == Act.FINISH_AND_KILL_ITSELF:
            while (output := self._output(entry)) is not None:
                self.endpoint.send(entry.frontend_id, ResponseBatch(self.spec.epoch, [output]))
                if output.final:
                    break
            time.sleep(0.1)  # the tokens leave this process; then it dies
            os.kill(os.getpid(), signal.SIGKILL)
        elif first != Act.HANG:
            self.running[entry.request.key] = entry

    def _output(self, entry: _Running) -> SequenceOutput | None:
        request = entry.request
        tokens = expected_tokens(unpack_tokens(request.prompt_ids), 1, entry.made)
        output = SequenceOutput(key=request.key, offset=entry.made, token_ids=pack_tokens(tokens))
        entry.made += 1
        if entry.made - token_count(request.generated_ids) >= (request.sampling.max_tokens or 1):
            return SequenceOutput(
                key=output.key, offset=output.offset, token_ids=output.token_ids, finish_reason=FinishReason.LENGTH
            )
        return output

    def _step(self) -> None:
        """One token for each running sequence, one message for each frontend."""
        batches: dict[int, list[SequenceOutput]] = {}
        for key, entry in list(self.running.items()):
            output = self._output(entry)
            if output is None:
                continue
            batches.setdefault(entry.frontend_id, []).append(output)
            if output.final:
                del self.running[key]
        for frontend_id, outputs in batches.items():
            self.endpoint.send(frontend_id, ResponseBatch(self.spec.epoch, outputs))

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            load = WorkerLoad(running=len(self.running), admitting=not self.draining)
            self.endpoint.broadcast(Heartbeat(self.spec.epoch, 0.0, load))


def start_time_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123 - /proc
        return int(file.read().rpartition(")")[2].split()[19])


def main() -> int:
    """Run one scripted worker process as its script says."""
    spec = read_launch_spec()
    script = Script(spec.model.name)
    if script is Script.DIE_EARLY:
        os.kill(os.getpid(), signal.SIGTERM)
    worker = ScriptedWorker(spec)
    pid = os.getpid()
    report = worker.endpoint.report
    report(
        WorkerIdentity(rank=0, pid=pid, start_time=start_time_ticks(pid), host=os.uname().nodename, epoch=spec.epoch)
    )
    report(InitProgress(spec.epoch, "pretending to load weights"))
    if script is Script.FAIL:
        report(WorkerFailed(spec.epoch, 0, "there are no weights in this fake"))
        return 1
    if script is Script.DIE_LOADING:
        os.kill(pid, signal.SIGKILL)
    if script is Script.LOAD_FOREVER:
        time.sleep(600)
    report(WorkerReady(spec.epoch, describe(spec, worker.address)))
    worker.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
