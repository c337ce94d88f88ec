"""The executor's forms around the same instant engine, and what a load on one of them costs.

in-process    engine on a thread of this process
ipc, remote   one worker process with two frontends, both this process: its launcher's queues, and a TCP attachment

The load's tasks read results as the HTTP frontend does, each on its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from benchmarks.instant_engine import MODEL, InstantEngine, instant_config, load_instant_runner
from benchmarks.processes import cpu_us
from twostroke.executor.base import GenerationExecutor
from twostroke.executor.ipc import IpcExecutor
from twostroke.executor.remote import RemoteExecutor
from twostroke.ipc.secret import new_secret
from twostroke.protocol.ids import ClientIds, SequenceKey, draw_frontend_id
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens, token_count
from twostroke.protocol.worker import Role
from twostroke.worker.in_process import InProcessExecutor

PROMPT = pack_tokens(range(1, 17))
_DEADLINE_S = 60.0
_LAUNCH_S = 30.0


@dataclass(frozen=True, slots=True)
class Form:
    """One executor.

    Attributes:
        executor: What requests are submitted to.
        worker_pid: The process that holds its engine; None if that is this one.
    """

    executor: GenerationExecutor
    worker_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A closed load: `streams` at the same time, each of `requests` one after the other, of `tokens` each.

    Attributes:
        step_ms: Milliseconds of an engine step; 0 is as fast as it goes.
    """

    streams: int
    requests: int
    tokens: int
    step_ms: int = 0

    @property
    def all_requests(self) -> int:
        """Over all streams."""
        return self.streams * self.requests

    @property
    def all_tokens(self) -> int:
        """Over all requests."""
        return self.all_requests * self.tokens


@dataclass(frozen=True, slots=True)
class Spent:
    """What a load took.

    Attributes:
        wall_s: From the first submit to the last token.
        frontend_us: CPU of this process; for the in-process form the engine's is in it.
        worker_us: CPU of the worker process.
    """

    wall_s: float
    frontend_us: float
    worker_us: float


@dataclass(frozen=True, slots=True)
class Moment:
    """Clocks before a load.

    This process reads its own CPU time from the C library: the kernel's files, which serve for other processes, tell of
    a running thread as of the last tick.
    """

    wall_s: float
    own_s: float

    @classmethod
    def now(cls) -> Self:
        """The clocks now."""
        return cls(time.perf_counter(), time.process_time())

    def spent(self, worker_us: float) -> Spent:
        """What was spent since then, `worker_us` by another process."""
        return Spent(time.perf_counter() - self.wall_s, (time.process_time() - self.own_s) * 1e6, worker_us)


@asynccontextmanager
async def open_forms(streams: int) -> AsyncIterator[dict[str, Form]]:
    """All forms, by name, for up to `streams` requests at the same time."""
    config = instant_config(streams)
    in_process = InProcessExecutor(load_instant_runner(MODEL, config, print), MODEL, config, InstantEngine)
    secret = new_secret()
    ipc = IpcExecutor.start("benchmarks.instant_engine", Role.AGGREGATED, MODEL, config, secret=secret)
    try:
        description = await asyncio.wait_for(asyncio.wrap_future(ipc.ready), _LAUNCH_S)
        remote = await RemoteExecutor.attach(description.address, secret, ClientIds(draw_frontend_id()))
        try:
            yield {"in-process": Form(in_process), "ipc": Form(ipc, ipc.pid), "remote": Form(remote, ipc.pid)}
        finally:
            remote.shutdown()
    finally:
        await asyncio.to_thread(ipc.shutdown)
        in_process.shutdown()


async def measure(form: Form, load: Load) -> Spent:
    """Put `load` on `form`.

    Raises:
        RuntimeError: Tokens were lost.
        TimeoutError: It did not end.
    """
    before, worker_before = Moment.now(), _worker_us(form)
    async with asyncio.timeout(_DEADLINE_S):
        made = await asyncio.gather(*(_stream(form.executor, load) for _ in range(load.streams)))
    if sum(made) != load.all_tokens:
        raise RuntimeError(f"{sum(made)} tokens came, not {load.all_tokens}")
    return before.spent(_worker_us(form) - worker_before)


async def lone_request_s(form: Form, requests: int, pause_s: float) -> list[float]:
    """Seconds that each of some one-token requests took, each sent to a machine that idles since `pause_s`."""
    seconds = []
    for _ in range(requests):
        await asyncio.sleep(pause_s)
        started = time.perf_counter()
        await _request(form.executor, 1, 0)
        seconds.append(time.perf_counter() - started)
    return seconds


def request_of(client_id: int, tokens: int, step_ms: int = 0) -> GenerationRequest:
    """A request to the instant engine for exactly `tokens` tokens, one every `step_ms`."""
    sampling = SamplingParams(max_tokens=tokens, seed=step_ms, ignore_eos=True)
    return GenerationRequest(key=SequenceKey(client_id), prompt_ids=PROMPT, sampling=sampling)


def _worker_us(form: Form) -> float:
    return 0.0 if form.worker_pid is None else cpu_us(form.worker_pid)


async def _stream(executor: GenerationExecutor, load: Load) -> int:
    return sum([await _request(executor, load.tokens, load.step_ms) for _ in range(load.requests)])


async def _request(executor: GenerationExecutor, tokens: int, step_ms: int) -> int:
    """Run one request as the HTTP frontend does; how many tokens came."""
    result = executor.submit(request_of(executor.draw_client_id(), tokens, step_ms))
    woken = asyncio.Event()
    result.subscribe(woken.set)
    made = 0
    while True:
        outputs = result.take_waiting()
        made += sum(token_count(output.token_ids) for output in outputs)
        if outputs and outputs[-1].final:
            return made
        if not outputs:
            await woken.wait()
            woken.clear()
