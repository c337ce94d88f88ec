"""`n` on every path: one process, one role and two give the same choices, and leave no block behind."""

from pathlib import Path

import httpx
import pytest

from tests.support.cluster import running_cluster, running_server
from tests.support.tiny_models import save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from twostroke.protocol.config import Dtype, EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.worker.in_process import InProcessExecutor

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

BLOCK = 16
ENGINE = {"max_batched_tokens": 64, "max_sequences": 8, "kv_cache": {"block_size": BLOCK, "num_blocks": 200}}
CONFIG = {"model": {"dtype": "float32"}, "context": ENGINE, "generation": ENGINE, "aggregated": {"port": 0, **ENGINE}}
PROMPT = [3 + (7 * number) % (VOCAB_SIZE - 3) for number in range(5 * BLOCK + 5)]
OUTPUT_TOKENS = 12
SEED = 41


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    made = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama", vocab_size=VOCAB_SIZE, eos_token_id=0)
    save_tiny_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What one process makes of seeds 41 to 44, each in a request of its own, and of one request for four."""
    engine = EngineConfig(
        max_batched_tokens=64, max_sequences=8, kv_cache=KVCacheConfig(block_size=BLOCK, num_blocks=200), threads=1
    )
    executor = InProcessExecutor.load(ModelConfig(path=str(folder), dtype=Dtype.FLOAT32), engine)

    def request(seed: int, n: int) -> GenerationRequest:
        return GenerationRequest(
            key=SequenceKey(executor.draw_client_id()),
            prompt_ids=pack_tokens(PROMPT),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=seed),
            n=n,
        )

    try:
        together = [result.wait(60).token_ids for result in executor.submit_all(request(SEED, 4))]
        alone = [executor.submit(request(SEED + index, 1)).wait(60).token_ids for index in range(4)]
    finally:
        executor.shutdown()
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 4
    return together


def ask(http: str, n: int, **fields: object) -> tuple[list[list[int]], dict[str, int]]:
    """The token ids of each choice, and the prompt and completion tokens."""
    body = {"prompt": PROMPT, "n": n, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{http}/v1/completions", json=body | fields, timeout=60, trust_env=False)
    assert response.status_code == httpx.codes.OK, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    return [choice["token_ids"] for choice in answer["choices"]], answer["usage"]


def check(http: str, expected: list[list[int]]) -> None:
    """Seeded choices are those of one process; greedy ones are equal; usage counts the prompt once."""
    tokens, usage = ask(http, 4, seed=SEED)
    assert tokens == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 4 * OUTPUT_TOKENS)
    greedy, usage = ask(http, 3, temperature=0)
    assert greedy[0] == greedy[1] == greedy[2]
    assert usage["completion_tokens"] == 3 * OUTPUT_TOKENS
    ended, _ = ask(http, 3, seed=SEED, max_tokens=1)
    assert ended == [tokens[:1] for tokens in expected[:3]]


def test_one_role_gives_the_choices_of_one_process(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """`twostroke serve`."""
    with running_server(folder, tmp_path, CONFIG) as server:
        check(server.http, expected)


def test_two_roles_give_the_choices_of_one_process(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """A router, a context and a generation server; afterwards every block is free or cached, and no lease is left."""
    with running_cluster(folder, tmp_path, CONFIG) as cluster:
        check(cluster.http, expected)
        cluster.wait_idle()
