"""Gaps between the tokens of running streams while prompts of 8192 tokens arrive: one engine against two roles.

    aggregated, chunk N   one process, one engine, N tokens a step at most
    disaggregated         a context and a generation process, with the KV transfer between them, on the same GPU

On one GPU the two roles still share its units, which the driver gives to one process at a time: two GPUs would do
better. Streams run on the generation engine from their start; each long prompt is computed by the context engine and
handed over.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import wait

import msgspec

from benchmarks.gpu.child_pipe import ChildPipe
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.role_messages import Answer, Made, Ready
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens, token_count
from twostroke.protocol.transfer import ContextPhaseParams
from twostroke.protocol.worker import Role

DISAGGREGATED = "disaggregated"
_MODULE = "benchmarks.gpu.role_process"
_START_S = 75.0
_FIRST_LONG = 1000
_PATIENCE_S = 30.0
_TOKENS = 61
"""Prompts use so many different ones."""
MS = 1e3

Process = ChildPipe[GenerationRequest, Answer]


@dataclass(frozen=True, slots=True)
class Load:
    """What each contender is asked.

    Attributes:
        streams: That run all the time.
        stream_prompt: Tokens of each of their prompts.
        stream_output: Tokens that each makes at most.
        prompt: Tokens of a long prompt.
        output: Tokens of the answer to one.
        arrivals: Long prompts.
        every_s: One comes so often.
        settle_s: Before the first of them.
        chunks: Token budgets of the aggregated engines.
    """

    streams: int = 16
    stream_prompt: int = 512
    stream_output: int = 3000
    prompt: int = 8192
    output: int = 16
    arrivals: int = 4
    every_s: float = 1.2
    settle_s: float = 1.0
    chunks: tuple[int, ...] = (8192, 2048)


REHEARSED = Load(
    streams=2,
    stream_prompt=9,
    stream_output=100,
    prompt=40,
    output=2,
    arrivals=1,
    every_s=0.1,
    settle_s=0.1,
    chunks=(64,),
)


@dataclass
class Observed:
    """What a run showed.

    Attributes:
        moments: By client id, when each token was there.
        sent: By client id, when the request was sent.
        errors: Of requests that failed.
        since: When the first long prompt was sent.
    """

    moments: dict[int, list[float]] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    since: float = 0.0

    def gaps_s(self, since: float) -> list[float]:
        """Between tokens of the streams, from a moment on."""
        streams = (moments for client_id, moments in self.moments.items() if client_id < _FIRST_LONG)
        return [b - a for moments in streams for a, b in pairwise(moments) if b >= since]

    def first_token_s(self) -> list[float]:
        """Of the long prompts."""
        return [
            self.moments[one][0] - at for one, at in self.sent.items() if one >= _FIRST_LONG and one in self.moments
        ]

    def second_token_s(self) -> list[float]:
        """From the first to the second token of each long prompt: the hand-over, where there is one."""
        long = (moments for client_id, moments in self.moments.items() if client_id >= _FIRST_LONG)
        return [moments[1] - moments[0] for moments in long if len(moments) > 1]


def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    load = REHEARSED if machine.rehearses else Load()
    findings.note(
        f"{load.streams} streams after {load.stream_prompt} tokens; a prompt of {load.prompt} tokens every "
        f"{load.every_s} s, {load.arrivals} in all"
    )
    for chunk in load.chunks:
        with _running(machine, Role.AGGREGATED, chunk) as server:
            seen = Run(load, server, server).go()
        _tell(findings, f"aggregated, chunk {chunk}", seen)
    with ExitStack() as stack:
        context, generation = (
            stack.enter_context(_running(machine, role, max(load.chunks), ready=False))
            for role in (Role.CONTEXT, Role.GENERATION)
        )
        for process in (context, generation):
            _wait_ready(process)
        seen = Run(load, context, generation).go()
    _tell(findings, DISAGGREGATED, seen)


def _running(machine: Machine, role: Role, chunk: int, *, ready: bool = True) -> Process:
    process: Process = ChildPipe(_MODULE, [machine.mode.value, role.value, str(chunk)], Answer)  # type: ignore[arg-type] # a union
    if ready:
        _wait_ready(process)
    return process


def _wait_ready(process: Process) -> None:
    answer = process.answer(_START_S)
    if not isinstance(answer, Ready):
        raise RuntimeError(f"process {process.process.pid} began with {answer}")  # noqa: TRY004 - no wrong argument


class Run:
    """One run over one contender; plays the router.

    Args:
        load: What to ask.
        context: Takes the long prompts.
        generation: Takes the streams, and what is handed over; the same one where there is one engine.
    """

    def __init__(self, load: Load, context: Process, generation: Process) -> None:
        self._load = load
        self._context = context
        self._generation = generation
        self._requests: dict[int, GenerationRequest] = {}
        self._open: set[int] = set()
        self._seen = Observed()

    def go(self) -> Observed:
        """Streams for a while, then the long prompts, until all of those are answered."""
        load = self._load
        self._ask_long(_FIRST_LONG)  # compiles, and connects the two roles
        self._listen(_PATIENCE_S, self._long_prompts_done)
        self._seen = seen = Observed(errors=self._seen.errors)
        for number in range(1, load.streams + 1):
            self._ask(number, load.stream_prompt, load.stream_output, Phase.FULL, self._generation)
        self._listen(_PATIENCE_S, lambda: len(seen.moments) == load.streams)
        self._listen(load.settle_s, lambda: False)
        seen.since = time.monotonic()
        for number in range(1, load.arrivals + 1):
            self._ask_long(_FIRST_LONG + number)
            self._listen(load.every_s, lambda: False)
        self._listen(_PATIENCE_S, self._long_prompts_done)
        return seen

    def _long_prompts_done(self) -> bool:
        return max(self._open, default=0) < _FIRST_LONG

    def _ask_long(self, client_id: int) -> None:
        phase = Phase.FULL if self._context is self._generation else Phase.CONTEXT_ONLY
        self._ask(client_id, self._load.prompt, self._load.output, phase, self._context)

    def _ask(self, client_id: int, prompt: int, output: int, phase: Phase, process: Process) -> None:
        tokens = [(client_id * 7 + at * 31) % _TOKENS for at in range(prompt)]
        request = GenerationRequest(
            key=SequenceKey(client_id),
            prompt_ids=pack_tokens(tokens),
            sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            phase=phase,
        )
        self._requests[client_id] = request
        self._open.add(client_id)
        self._seen.sent[client_id] = time.monotonic()
        process.order(request)

    def _listen(self, seconds: float, done: Callable[[], bool]) -> None:
        """Take answers for so long, or until `done`."""
        end = time.monotonic() + seconds
        processes = {process.connection: process for process in (self._context, self._generation)}
        while not done() and (left := end - time.monotonic()) > 0:
            for connection in wait(list(processes), left):
                answer = next(one for key, one in processes.items() if key is connection).answer(1.0)
                if isinstance(answer, Made):
                    for output in answer.outputs:
                        self._take(output, answer.at)

    def _take(self, output: SequenceOutput, at: float) -> None:
        client_id = output.key.client_id
        self._seen.moments.setdefault(client_id, []).extend([at] * token_count(output.token_ids))
        if output.error is not None:
            self._seen.errors.append(f"request {client_id}: {output.error.message}")
        if output.context_phase_params is not None:
            self._hand_over(client_id, output.context_phase_params)
        elif output.error is not None or output.finish_reason is not None:
            self._open.discard(client_id)

    def _hand_over(self, client_id: int, params: ContextPhaseParams) -> None:
        request = msgspec.structs.replace(
            self._requests[client_id],
            phase=Phase.GENERATION_ONLY,
            generated_ids=params.first_token_ids,
            context_phase_params=params,
        )
        self._generation.order(request)


def _tell(findings: Findings, name: str, seen: Observed) -> None:
    gaps = sorted(seen.gaps_s(seen.since))
    figures = {"p50": gaps[len(gaps) // 2], "p99": gaps[int(len(gaps) * 0.99)], "longest": gaps[-1]}
    for figure, value in figures.items():
        findings.add(f"gap between tokens, {figure}", "ms", {name: [value * MS]})
    for case, values in (
        ("time to first token of a long prompt", seen.first_token_s()),
        ("first to second token of a long prompt", seen.second_token_s()),
    ):
        if values:
            findings.add(case, "ms", {name: [value * MS for value in values]})
    if seen.errors:
        findings.note(f"{name}: {len(seen.errors)} requests failed, the first as {seen.errors[0]}")
