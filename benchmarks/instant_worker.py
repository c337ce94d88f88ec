"""Workers of both roles without an engine, at real sockets: what a router spends is then all that is measured.

    python -m benchmarks.instant_worker SECRET_FILE TOKEN,TOKEN,...    prints `workers: CONTEXT GENERATION`

Each role is a worker's endpoint on a thread of its own, speaking the protocol of real workers: attaching over CURVE,
heartbeats, one message a step and frontend, hand-overs. The tokens are the given ones in turn. A request's seed is its
pace: so many milliseconds a token, one at least: no engine steps faster, and each step is one of all that run.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.ipc.endpoint import EndpointOptions, FrontendLost, Inbound, WorkerEndpoint
from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.secret import load_secret
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.requests import Abort, GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, ResponseBatch, SequenceOutput
from twostroke.protocol.tokens import pack_tokens, token_count
from twostroke.protocol.transfer import TRANSFER_VERSION, ContextPhaseParams, LayoutFingerprint, TransferHandle
from twostroke.protocol.worker import Heartbeat, Role, WorkerDescription, WorkerLoad

MODEL = "instant"
VOCABULARY = 49152
HEARTBEAT_S = 0.25
IDLE_S = 0.05
LEAST_STEP_MS = 1
"""Of an engine that takes no time."""
_BLOCK = 16
_LAYOUT = LayoutFingerprint("0" * 64, "bfloat16", _BLOCK, 30, 3, 64)


@dataclass(slots=True)
class _Sequence:
    """One request that runs.

    Attributes:
        offset: Of the next token.
        told: Of the first token that its frontend was not told of.
        begins: Of the first token that is made here.
        ends: After the last one.
    """

    frontend_id: int
    request: GenerationRequest
    offset: int
    ends: int
    begins: int
    told: int

    @property
    def due(self) -> bool:
        """Whether the frontend is told of the newest token now."""
        first, last = self.told == self.begins, self.offset == self.ends
        return first or last or self.offset - self.told >= self.request.tell_every


@dataclass(slots=True)
class _Pace:
    """The sequences that make a token every `step_s`; `due` is when they do so next."""

    step_s: float
    due: float = 0.0
    sequences: list[_Sequence] = field(default_factory=list)


class InstantWorker:
    """One worker; `run` belongs to one thread.

    Args:
        role: `CONTEXT` or `GENERATION`.
        secret: Of the cluster.
        tokens: What it makes, in turn; int32 buffers of one token each.
        folder: For its local sockets.
    """

    def __init__(self, role: Role, secret: bytes, tokens: list[bytes], folder: Path) -> None:
        engine = EngineConfig(worker_bind="tcp://127.0.0.1:0")
        self._spec = LaunchSpec.draw(role, ModelConfig(path=MODEL), engine, secret=secret, directory=folder)
        self._endpoint = WorkerEndpoint(self._spec, EndpointOptions())
        self._tokens = tokens
        self._paces: dict[int, _Pace] = {}
        self._stop = threading.Event()
        self._beat_at = 0.0
        self.address = self._endpoint.address

    def stop(self) -> None:
        """Make `run` return; from any thread."""
        self._stop.set()
        self._endpoint.wake()

    def run(self) -> None:
        """Serve until `stop`."""
        self._endpoint.describe(
            WorkerDescription(
                role=self._spec.role,
                model=MODEL,
                max_model_len=8192,
                vocab_size=VOCABULARY,
                eos_token_ids=(0,),
                num_blocks=1 << 16,
                max_sequences=1 << 12,
                layout=_LAYOUT,
                address=self.address,
            )
        )
        while not self._stop.is_set():
            for event in self._endpoint.poll(self._idle_s()):
                self._take(event)
            self._step(time.monotonic())
        self._endpoint.close()

    def _idle_s(self) -> float:
        """How long nothing is due. A poll counts in whole milliseconds and rounds down: the rest is gone round.

        The fastest steps are rather late than that they keep a processor busy.
        """
        now = time.monotonic()
        running = [pace for pace in self._paces.values() if pace.sequences]
        idle_s = min((pace.due - now for pace in running), default=IDLE_S)
        if idle_s > 0 and any(pace.step_s * 1000 <= LEAST_STEP_MS for pace in running):
            return max(idle_s, LEAST_STEP_MS / 1000)
        return max(idle_s, 0.0)

    def _take(self, event: Inbound | FrontendLost) -> None:
        if isinstance(event, FrontendLost):
            frontend_id = event.frontend_id
            self._forget(lambda one: one.frontend_id == frontend_id)
        elif isinstance(event.body, GenerationRequest):
            self._admit(event.frontend_id, event.body)
        elif isinstance(event.body, Abort):
            client_id = event.body.client_id
            self._forget(lambda one: one.request.key.client_id == client_id)

    def _forget(self, matches: Callable[[_Sequence], bool]) -> None:
        for pace in self._paces.values():
            pace.sequences = [one for one in pace.sequences if not matches(one)]

    def _admit(self, frontend_id: int, request: GenerationRequest) -> None:
        offset = token_count(request.generated_ids)
        count = 1 if request.phase is Phase.CONTEXT_ONLY else (request.sampling.max_tokens or 1) - offset
        # A context phase is one step, and at once: what is paced is decoding.
        step_ms = 0 if request.phase is Phase.CONTEXT_ONLY else request.sampling.seed
        step_ms = max(step_ms, LEAST_STEP_MS)
        pace = self._paces.setdefault(step_ms, _Pace(step_ms / 1000))
        if not pace.sequences:
            pace.due = time.monotonic() + pace.step_s
        pace.sequences.append(_Sequence(frontend_id, request, offset, offset + count, offset, offset))

    def _step(self, now: float) -> None:
        """One token for each sequence that is due, one message for each frontend."""
        for pace in self._paces.values():
            if pace.sequences and now >= pace.due:
                # Steps that came late are made up for, but for the fastest: there nobody counts on the pace.
                pace.due = (now if pace.step_s * 1000 <= LEAST_STEP_MS else pace.due) + pace.step_s
                batches: dict[int, list[SequenceOutput]] = {}
                for one in pace.sequences:
                    one.offset += 1
                    if one.due:
                        batches.setdefault(one.frontend_id, []).append(self._output(one))
                pace.sequences = [one for one in pace.sequences if one.offset < one.ends]
                for frontend_id, outputs in batches.items():
                    self._endpoint.send(frontend_id, ResponseBatch(self._spec.epoch, outputs))
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            running = sum(len(pace.sequences) for pace in self._paces.values())
            self._endpoint.broadcast(Heartbeat(self._spec.epoch, 0.0, WorkerLoad(running=running)))

    def _output(self, one: _Sequence) -> SequenceOutput:
        request, offset = one.request, one.told
        tokens = b"".join(self._tokens[at % len(self._tokens)] for at in range(offset, one.offset))
        one.told = one.offset
        if one.offset < one.ends:
            return SequenceOutput(request.key, offset, tokens)
        if request.phase is not Phase.CONTEXT_ONLY or request.sampling.max_tokens == 1:
            return SequenceOutput(request.key, offset, tokens, finish_reason=FinishReason.LENGTH)
        return SequenceOutput(
            request.key,
            offset,
            tokens,
            finish_reason=FinishReason.HANDOVER,
            cached_tokens=0,
            context_phase_params=self._handover(request, tokens),
        )

    def _handover(self, request: GenerationRequest, first: bytes) -> ContextPhaseParams:
        """As large as a real one."""
        prompt_tokens = token_count(request.prompt_ids)
        handle = TransferHandle(
            version=TRANSFER_VERSION,
            epoch=self._spec.epoch,
            key=request.key,
            address=self.address,
            layout=_LAYOUT,
            blocks=-(-prompt_tokens // _BLOCK),
            expires_in_s=60.0,
            mac=bytes(32),
        )
        return ContextPhaseParams(
            version=TRANSFER_VERSION, handle=handle, prompt_tokens=prompt_tokens, first_token_ids=first
        )


def main() -> None:
    """Serve both roles until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("secret_file", type=Path)
    parser.add_argument("tokens", help="token ids, separated by commas")
    arguments = parser.parse_args()
    secret = load_secret(str(arguments.secret_file))
    tokens = [pack_tokens([int(token)]) for token in arguments.tokens.split(",")]
    with tempfile.TemporaryDirectory() as context_folder, tempfile.TemporaryDirectory() as generation_folder:
        context = InstantWorker(Role.CONTEXT, secret, tokens, Path(context_folder))
        generation = InstantWorker(Role.GENERATION, secret, tokens, Path(generation_folder))
        print(f"workers: {context.address} {generation.address}", flush=True)
        thread = threading.Thread(target=context.run, name="context worker", daemon=True)
        thread.start()
        generation.run()


if __name__ == "__main__":
    main()
