"""One request through two worker processes, the KV cache over UCX: the tokens are those of one worker."""

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_runner import expected_output
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.two_roles import running_two_roles
from twostroke.executor.ipc import IpcExecutor
from twostroke.protocol.config import Dtype, EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role
from twostroke.worker.in_process import InProcessExecutor

pytestmark = pytest.mark.cluster

BLOCK = 4
CHUNK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2, 100]
OUTPUT_TOKENS = 12
ENGINE = EngineConfig(
    max_batched_tokens=CHUNK,
    max_sequences=8,
    threads=1,
    shutdown_s=5.0,
    kv_cache=KVCacheConfig(block_size=BLOCK, num_blocks=300),
)


def prompt_of(length: int, vocab_size: int) -> list[int]:
    """A prompt that shares no block with one of another length."""
    return [3 + (length * 31 + position * 7) % (vocab_size - 3) for position in range(length)]


async def test_tokens_do_not_depend_on_the_roles() -> None:
    """Prompts around block and chunk edges, all at once, twice: the second time the prefix caches hold them."""
    prompts = [prompt_of(length, 1000) for length in LENGTHS]
    async with running_two_roles(ENGINE) as roles:
        for _ in range(2):
            outputs = await asyncio.gather(*(roles.frontend.generate(prompt, OUTPUT_TOKENS) for prompt in prompts))
            assert outputs == [expected_output(prompt, OUTPUT_TOKENS, 1000) for prompt in prompts]
        await roles.wait_idle()
        done = roles.generation.load.counters
        assert done.transfers_done == 2 * len(prompts)
        assert done.transfers_failed == 0
        assert done.prompt_tokens == 0, "a generation worker computes no prompt"
        blocks = sum(-(-length // BLOCK) for length in LENGTHS)
        partly = sum(1 for length in LENGTHS if length % BLOCK)
        block_bytes = BLOCK * 3 * 8
        assert done.transfer_bytes == (blocks + partly) * block_bytes, "later only partly filled blocks travel"
        written = roles.context.load.counters
        assert (written.transfers_done, written.transfer_bytes) == (done.transfers_done, done.transfer_bytes)


async def test_a_request_of_one_token_never_reaches_the_generation_worker() -> None:
    """What ends with its first token is not handed over, and leaves no lease."""
    async with running_two_roles(ENGINE) as roles:
        prompt = prompt_of(9, 1000)
        assert await roles.frontend.generate(prompt, 1) == expected_output(prompt, 1, 1000)
        await roles.wait_idle()
        assert roles.context.load.counters.transfers_done == 0


async def test_other_block_sizes_are_refused() -> None:
    """A generation worker whose cache is laid out otherwise refuses the hand-over with both fingerprints."""
    async with running_two_roles(ENGINE, generation_model=ModelConfig(path="block=8")) as roles:
        with pytest.raises(InvalidRequestError, match=r"block_size=4.*block_size=8"):
            await roles.frontend.generate(prompt_of(9, 1000), 5)


@pytest.mark.long
async def test_a_real_model_gives_the_same_tokens_in_every_form(tmp_path: Path) -> None:
    """In-process, in one worker process, and over two: greedy tokens of a tiny random model in float32 agree."""
    model = ModelConfig(path=str(save_tiny_model(tmp_path / "tiny")), dtype=Dtype.FLOAT32)
    prompts = [prompt_of(length, VOCAB_SIZE) for length in LENGTHS]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    by_form = []
    for executor in (
        InProcessExecutor.load(model, ENGINE),
        IpcExecutor.launch("twostroke.worker", Role.AGGREGATED, model, ENGINE),
    ):
        requests = [
            GenerationRequest(
                key=SequenceKey(executor.draw_client_id()), prompt_ids=pack_tokens(prompt), sampling=sampling
            )
            for prompt in prompts
        ]
        by_form.append([result.wait(60).token_ids for result in [executor.submit(one) for one in requests]])
        await asyncio.to_thread(executor.shutdown, 5.0)
    async with running_two_roles(
        ENGINE,
        context_model=model,
        generation_model=model,
        context_world="context_server.worker",
        generation_world="generation_server.worker",
    ) as roles:
        by_form.append(
            list(await asyncio.gather(*(roles.frontend.generate(prompt, OUTPUT_TOKENS) for prompt in prompts)))
        )
        await roles.wait_idle()
    assert by_form[0] == by_form[1] == by_form[2]
