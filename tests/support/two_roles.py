"""A context and a generation worker as real processes, and a small stand-in for the router in front of both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from twostroke.executor.ipc import IpcExecutor
from twostroke.executor.remote import RemoteExecutor
from twostroke.executor.result import GenerationResult
from twostroke.ipc.secret import new_secret
from twostroke.protocol.config import EngineConfig, ModelConfig
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.ids import ClientIds, SequenceKey, draw_frontend_id
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.transfer import ContextPhaseParams
from twostroke.protocol.worker import BlockCounts, Role, WorkerLoad

FAKE_WORLD = "tests.support.fake_worker"
POLL_S = 0.05


@dataclass
class Frontend:
    """What plays the router: attached to both workers under one frontend id."""

    client_ids: ClientIds
    context: RemoteExecutor
    generation: RemoteExecutor

    @classmethod
    async def attach(cls, context: str, generation: str, secret: bytes) -> "Frontend":
        """Attach to both workers."""
        client_ids = ClientIds(draw_frontend_id())
        return cls(
            client_ids,
            await RemoteExecutor.attach(context, secret, client_ids),
            await RemoteExecutor.attach(generation, secret, client_ids),
        )

    def start_context(self, key: SequenceKey, prompt: Sequence[int], sampling: SamplingParams) -> GenerationResult:
        """Send the context phase."""
        return self.context.submit(
            GenerationRequest(key=key, prompt_ids=pack_tokens(prompt), sampling=sampling, phase=Phase.CONTEXT_ONLY)
        )

    def start_generation(
        self, key: SequenceKey, prompt: Sequence[int], sampling: SamplingParams, params: ContextPhaseParams
    ) -> GenerationResult:
        """Send the generation phase."""
        return self.generation.submit(
            GenerationRequest(
                key=key,
                prompt_ids=pack_tokens(prompt),
                generated_ids=params.first_token_ids,
                sampling=sampling,
                phase=Phase.GENERATION_ONLY,
                context_phase_params=params,
            )
        )

    def draw_key(self) -> SequenceKey:
        """A key for a new request."""
        return SequenceKey(self.client_ids.draw())

    async def generate(self, prompt: Sequence[int], max_tokens: int, key: SequenceKey | None = None) -> list[int]:
        """Both phases of one greedy request; all its tokens."""
        key = key or self.draw_key()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        first = await self.start_context(key, prompt, sampling).completion()
        if first.finish_reason is not FinishReason.HANDOVER:
            return first.token_ids
        assert first.context_phase_params is not None
        try:
            rest = await self.start_generation(key, prompt, sampling, first.context_phase_params).completion()
        except TwostrokeError:
            self.context.abort_request(key.client_id)  # nobody will read the lease now
            raise
        return first.token_ids + rest.token_ids

    def abort(self, client_id: int) -> None:
        """Give a request up at both workers."""
        self.context.abort_request(client_id)
        self.generation.abort_request(client_id)

    def leave(self) -> None:
        """Detach from both."""
        self.context.shutdown()
        self.generation.shutdown()


@dataclass
class TwoRoles:
    """Two launched workers and the frontend attached to them."""

    context: IpcExecutor
    generation: IpcExecutor
    frontend: Frontend
    secret: bytes

    async def wait_idle(self, *workers: IpcExecutor, within_s: float = 15.0) -> None:
        """Wait until all blocks of `workers` (default: both) are free or cached, as their heartbeats tell."""
        watched = workers or (self.context, self.generation)
        await fresh_heartbeats(*watched)
        await wait_for(
            lambda: all(is_idle(worker.load.blocks) for worker in watched),
            within_s,
            lambda: str([worker.load for worker in watched]),
        )


async def wait_for(condition: Callable[[], bool], within_s: float = 15.0, state: Callable[[], str] = str) -> None:
    """Wait until `condition` holds; `state` says for people how things stand if it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - heartbeats change it on another thread, without an event
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"the condition did not come true in {within_s} s {state()}") from None


async def fresh_heartbeats(*workers: IpcExecutor) -> None:
    """Wait for heartbeats that were sent after this call; the next one may be on its way already, so for two."""
    for worker in workers:
        for _ in range(2):
            await _another_load(worker, worker.load)


async def _another_load(worker: IpcExecutor, old: WorkerLoad) -> None:
    await wait_for(lambda: worker.load is not old)


def is_idle(blocks: BlockCounts) -> bool:
    """Whether all blocks are free or cached; not before the first heartbeat."""
    return 0 < blocks.total == blocks.free + blocks.cached


@asynccontextmanager
async def running_two_roles(
    engine: EngineConfig,
    *,
    context_model: ModelConfig | None = None,
    generation_model: ModelConfig | None = None,
    context_world: str = FAKE_WORLD,
    generation_world: str = FAKE_WORLD,
) -> AsyncIterator[TwoRoles]:
    """Launch both workers (fake ones by default), attach to them, and end them afterwards."""
    secret = new_secret()
    context = IpcExecutor.start(context_world, Role.CONTEXT, context_model or ModelConfig(), engine, secret=secret)
    generation = IpcExecutor.start(
        generation_world, Role.GENERATION, generation_model or ModelConfig(), engine, secret=secret
    )
    try:
        described = [await asyncio.wrap_future(worker.ready) for worker in (context, generation)]
        frontend = await Frontend.attach(described[0].address, described[1].address, secret)
        try:
            yield TwoRoles(context, generation, frontend, secret)
        finally:
            frontend.leave()
    finally:
        await asyncio.gather(*(asyncio.to_thread(worker.shutdown, 5.0) for worker in (context, generation)))
