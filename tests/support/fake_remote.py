"""Stand-ins for attached workers: a `FakeWorker` does what a test tells it to, and keeps account of what it was told.

Nothing happens by itself: a test (or a script of steps run by `play`) makes the worker answer. Leases are counted the
way a context worker counts them: one starts with a hand-over, and ends when a generation worker's first token proves
that it was read, or by an abort.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from twostroke.executor.base import Health, HealthState, ResultSink
from twostroke.protocol.errors import AbortedError, EngineDeadError, RequestError, TwostrokeError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import pack_tokens, token_count
from twostroke.protocol.transfer import TRANSFER_VERSION, ContextPhaseParams, LayoutFingerprint, TransferHandle
from twostroke.protocol.worker import BlockCounts, Role, WorkerDescription, WorkerLoad

LAYOUT = LayoutFingerprint("digest", "float32", 16, 2, 2, 8)


def describe(role: Role, layout: LayoutFingerprint = LAYOUT, max_model_len: int = 512) -> WorkerDescription:
    """A worker of `role` that serves the tests' model."""
    return WorkerDescription(
        role=role,
        model="tiny",
        max_model_len=max_model_len,
        vocab_size=100,
        eos_token_ids=(0,),
        num_blocks=64,
        max_sequences=8,
        layout=layout,
    )


@dataclass(eq=False)
class FakeWorker:
    """One attached worker epoch (`router.workers.WorkerLink`).

    Attributes:
        description: What it says of itself.
        epoch: Its epoch.
        load: Its last report; assign a new one for each heartbeat.
        silence_s: Assign to make it fall silent.
        requests: Everything submitted, in order.
        sinks: Registered sinks by key; an entry leaves with its final event.
        aborts: Every abort, in order.
        leases: Sequences whose blocks wait for a reader, by client id and index.
        refusal: If set, `submit_to` raises it.
        on_submit: If set, called after each submission.
        dead: Why it is dead, or None.
    """

    description: WorkerDescription
    epoch: int = 1
    load: WorkerLoad = field(default_factory=lambda: WorkerLoad(blocks=BlockCounts(free=64)))
    silence_s: float = 0.0
    requests: list[GenerationRequest] = field(default_factory=list)
    sinks: dict[SequenceKey, ResultSink] = field(default_factory=dict)
    aborts: list[int] = field(default_factory=list)
    leases: set[tuple[int, int]] = field(default_factory=set)
    refusal: TwostrokeError | None = None
    on_submit: Callable[["FakeWorker", GenerationRequest], None] | None = None
    dead: str | None = None
    closed: bool = False

    @property
    def last(self) -> GenerationRequest:
        """The request submitted last."""
        return self.requests[-1]

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """Register and keep."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.refusal is not None:
            raise self.refusal
        if request.key in self.sinks:
            raise ValueError(f"key {request.key} is registered already")
        self.sinks |= zip(request.keys, sinks, strict=True)
        self.requests.append(request)
        if self.on_submit is not None:
            self.on_submit(self, request)

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """Fail the sinks of the request, or of one index, at once, and end its lease."""
        self.aborts.append(client_id)
        self.leases -= {lease for lease in self.leases if lease[0] == client_id and index in (None, lease[1])}
        for key in [key for key in self.sinks if key.client_id == client_id and index in (None, key.index)]:
            self.sinks.pop(key).fail(AbortedError("aborted"))

    def check_health(self) -> Health:
        """READY until `die`."""
        return Health(HealthState.READY) if self.dead is None else Health(HealthState.DEAD, self.dead)

    def shutdown(self, deadline_s: float | None = None) -> None:  # noqa: ARG002 - the boundary's signature
        """Detach: what is pending fails."""
        self.closed = True
        self.die("the link was closed")

    def die(self, reason: str = "killed by signal 9") -> None:
        """Every pending sink fails; leases are gone with the memory."""
        self.dead = self.dead or reason
        self.leases.clear()
        while self.sinks:
            self.sinks.popitem()[1].fail(EngineDeadError(self.dead))

    def answer(self, output: SequenceOutput) -> None:
        """Deliver one output as a receiving loop does: fed, then woken; dropped if nobody is registered."""
        sink = self.sinks.get(output.key)
        if sink is None:
            return
        if output.final:
            del self.sinks[output.key]
        sink.feed(output)
        if sink.loop is not None:
            sink.wake()

    def tokens(self, request: GenerationRequest, offset: int, *token_ids: int, cached: int | None = None) -> None:
        """Answer with tokens, not the last."""
        self.answer(SequenceOutput(request.key, offset, pack_tokens(token_ids), cached_tokens=cached))

    def finish(
        self, request: GenerationRequest, offset: int, *token_ids: int, reason: FinishReason = FinishReason.STOP
    ) -> None:
        """Answer with the last tokens."""
        self.answer(SequenceOutput(request.key, offset, pack_tokens(token_ids), finish_reason=reason))

    def hand_over(self, request: GenerationRequest, token_id: int = 7, cached: int = 0) -> None:
        """Answer a context_only request, or one sequence of it, with its first token; the lease begins."""
        if request.key not in self.sinks:
            return  # aborted before: a real worker does not begin a lease then either
        self.leases.add((request.key.client_id, request.key.index))
        first = pack_tokens([token_id])
        self.answer(
            SequenceOutput(
                request.key,
                token_count(request.generated_ids),
                first,
                finish_reason=FinishReason.HANDOVER,
                cached_tokens=cached,
                context_phase_params=context_phase_params(request, first),
            )
        )

    def fail(self, request: GenerationRequest, error: RequestError) -> None:
        """Answer with an error."""
        self.answer(SequenceOutput(request.key, token_count(request.generated_ids), error=error.to_info()))


def context_phase_params(request: GenerationRequest, first: bytes) -> ContextPhaseParams:
    """What a context worker sends along with `first`, its int32 token buffer."""
    handle = TransferHandle(
        version=TRANSFER_VERSION,
        epoch=1,
        key=request.key,
        address="tcp://127.0.0.1:1",
        layout=LAYOUT,
        blocks=1,
        expires_in_s=60.0,
    )
    return ContextPhaseParams(
        version=TRANSFER_VERSION,
        handle=handle,
        prompt_tokens=token_count(request.prompt_ids),
        first_token_ids=first,
    )


@dataclass(eq=False)
class RecordingSink:
    """A client's sink that keeps what it gets, and counts final events.

    Attributes:
        outputs: Everything fed.
        errors: Everything failed with.
        wakes: How often it was woken.
    """

    outputs: list[SequenceOutput] = field(default_factory=list)
    errors: list[TwostrokeError] = field(default_factory=list)
    wakes: int = 0
    loop: None = None

    @property
    def finals(self) -> int:
        """How many final events came."""
        return len(self.errors) + sum(output.final for output in self.outputs)

    def feed(self, output: SequenceOutput) -> None:
        """Keep it."""
        self.outputs.append(output)

    def fail(self, error: TwostrokeError) -> None:
        """Keep it."""
        self.errors.append(error)

    def wake(self) -> None:
        """Count it."""
        self.wakes += 1
