"""Worker processes and frontends that die at the worst moments: one final event, and every block comes back."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.support.fake_runner import expected_output
from tests.support.streaming_frontend import STREAMS
from tests.support.two_roles import Frontend, TwoRoles, running_two_roles, wait_for
from twostroke.protocol.config import EngineConfig, KVCacheConfig, ModelConfig, TransferConfig
from twostroke.protocol.errors import AbortedError, EngineDeadError, TransferError
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import Role

pytestmark = pytest.mark.cluster

PROMPT = list(range(10, 33))
ENGINE = EngineConfig(
    max_batched_tokens=16,
    max_sequences=8,
    threads=1,
    shutdown_s=5.0,
    kv_cache=KVCacheConfig(block_size=4, num_blocks=200),
    transfer=TransferConfig(lease_s=3.0, timeout_s=3.0),
)
OUTPUT_TOKENS = 20
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def kill(pid: int | None) -> None:
    """`kill -9`."""
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def next_request_is_right(roles: TwoRoles) -> None:
    """The pair still works."""
    assert await roles.frontend.generate(PROMPT, 6) == expected_output(PROMPT, 6, 1000)
    await roles.wait_idle()


async def test_a_killed_generation_worker_ends_its_requests_and_no_others() -> None:
    """The stream fails with the reason; the context worker lives on with all its blocks."""
    async with running_two_roles(ENGINE, generation_model=ModelConfig(path="slow=0.05")) as roles:
        task = asyncio.create_task(roles.frontend.generate(PROMPT, 100))
        await wait_for(lambda: roles.generation.load.running > 0)
        kill(roles.generation.pid)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 15)
        await roles.wait_idle(roles.context)
        assert roles.frontend.context.check_health().state.value == "ready"


async def test_a_killed_context_worker_fails_what_was_not_taken_over() -> None:
    """A hand-over whose worker is gone fails as a transfer error, and the reserved blocks come back."""
    async with running_two_roles(ENGINE) as roles:
        key = roles.frontend.draw_key()
        first = await roles.frontend.start_context(key, PROMPT, GREEDY).completion()
        assert first.context_phase_params is not None
        kill(roles.context.pid)
        result = roles.frontend.start_generation(key, PROMPT, GREEDY, first.context_phase_params)
        with pytest.raises(TransferError):
            await asyncio.wait_for(result.completion(), 15)
        await roles.wait_idle(roles.generation)


async def test_a_lease_that_nobody_reads_expires() -> None:
    """The blocks of a context phase without generation phase come back after `lease_s`; a late reader is told."""
    async with running_two_roles(ENGINE) as roles:
        key = roles.frontend.draw_key()
        first = await roles.frontend.start_context(key, PROMPT, GREEDY).completion()
        assert first.context_phase_params is not None
        await wait_for(lambda: roles.context.load.blocks.leased > 0)
        await roles.wait_idle(roles.context)
        result = roles.frontend.start_generation(key, PROMPT, GREEDY, first.context_phase_params)
        with pytest.raises(TransferError):
            await asyncio.wait_for(result.completion(), 15)
        await next_request_is_right(roles)


async def test_an_abort_between_the_phases_releases_the_lease() -> None:
    """The client left after the first token: the lease ends long before it would expire."""
    async with running_two_roles(ENGINE) as roles:
        key = roles.frontend.draw_key()
        await roles.frontend.start_context(key, PROMPT, GREEDY).completion()
        roles.frontend.abort(key.client_id)
        await roles.wait_idle(within_s=2.5)
        await next_request_is_right(roles)


async def test_a_frontend_that_vanishes_takes_its_requests_along(tmp_path: Path) -> None:
    """A killed frontend's streams end at both workers; other frontends are served all the while."""
    async with running_two_roles(ENGINE, generation_model=ModelConfig(path="slow=0.02")) as roles:
        (tmp_path / "secret").write_bytes(roles.secret)
        addresses = [worker.description.address for worker in (roles.context, roles.generation)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.streaming_frontend", *addresses, str(tmp_path / "secret")
        )
        try:
            await wait_for(lambda: roles.generation.load.running == STREAMS)
        finally:
            process.kill()
            await process.wait()
        await next_request_is_right(roles)
        await roles.wait_idle()


async def test_sigterm_lets_both_workers_finish() -> None:
    """Terminated in the middle of a stream, both end with 0, and the stream is whole."""
    async with running_two_roles(ENGINE, generation_model=ModelConfig(path="slow=0.02")) as roles:
        key = roles.frontend.draw_key()
        first = await roles.frontend.start_context(key, PROMPT, GREEDY).completion()
        assert first.context_phase_params is not None
        stream = roles.frontend.start_generation(key, PROMPT, GREEDY, first.context_phase_params)
        begun = await asyncio.wait_for(stream.next_output(), 15)
        assert begun is not None
        for worker in (roles.context, roles.generation):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGTERM)
        rest = await asyncio.wait_for(stream.completion(), 15)
        token_ids = [*first.token_ids, *unpack_tokens(begun.token_ids), *rest.token_ids]
        assert token_ids == expected_output(PROMPT, 40, 1000)
        for worker in (roles.context, roles.generation):
            await asyncio.wait_for(asyncio.wrap_future(worker.died), 10)


async def test_a_storm_of_aborts_leaves_no_block_behind() -> None:
    """Half of the requests are given up at random moments of both phases; the others are right to the last token."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)

    async def run(frontend: Frontend, prompt: list[int]) -> None:
        key = frontend.draw_key()
        task = asyncio.create_task(frontend.generate(prompt, OUTPUT_TOKENS, key))
        gives_up = draw.random() < 0.5
        if gives_up:
            await asyncio.sleep(draw.random() * 0.3)
            frontend.abort(key.client_id)
        try:
            assert await asyncio.wait_for(task, 30) == expected_output(prompt, OUTPUT_TOKENS, 1000)
        except (AbortedError, TransferError):
            assert gives_up  # TransferError: the abort came between the phases, and the lease ended before its reader

    async with running_two_roles(ENGINE) as roles:
        prompts = [[3 + (number * 13 + i) % 900 for i in range(draw.randrange(1, 40))] for number in range(80)]
        await asyncio.gather(*(run(roles.frontend, prompt) for prompt in prompts))
        await roles.wait_idle()
        await next_request_is_right(roles)


@pytest.mark.parametrize("victim", [Role.CONTEXT, Role.GENERATION])
async def test_a_death_in_a_storm_leaves_the_other_worker_whole(victim: Role) -> None:
    """One worker is killed among many transfers: every request ends, and the other worker gets every block back."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    prompts = [[3 + (number * 17 + i) % 900 for i in range(draw.randrange(1, 60))] for number in range(80)]
    async with running_two_roles(ENGINE) as roles:
        killed, survivor = roles.context, roles.generation
        if victim is Role.GENERATION:
            killed, survivor = survivor, killed
        tasks = [asyncio.create_task(roles.frontend.generate(prompt, OUTPUT_TOKENS)) for prompt in prompts]
        await wait_for(lambda: sum(task.done() for task in tasks) > draw.randrange(20))
        kill(killed.pid)
        async with asyncio.timeout(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for prompt, result in zip(prompts, results, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, EngineDeadError | TransferError), repr(result)
            else:
                assert result == expected_output(prompt, OUTPUT_TOKENS, 1000)
        await roles.wait_idle(survivor)


async def test_a_terminated_context_worker_waits_for_the_readers_of_its_leases() -> None:
    """SIGTERM after the first token: the lease is honoured, and the worker ends with it."""
    async with running_two_roles(ENGINE) as roles:
        key = roles.frontend.draw_key()
        first = await roles.frontend.start_context(key, PROMPT, GREEDY).completion()
        assert first.context_phase_params is not None
        assert roles.context.pid is not None
        os.kill(roles.context.pid, signal.SIGTERM)
        await wait_for(lambda: not roles.context.load.admitting)
        rest = await roles.frontend.start_generation(key, PROMPT, GREEDY, first.context_phase_params).completion()
        assert first.token_ids + rest.token_ids == expected_output(PROMPT, 40, 1000)
        await asyncio.wait_for(asyncio.wrap_future(roles.context.died), 10)
        await roles.wait_idle(roles.generation)
