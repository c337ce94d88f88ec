"""Greedy tokens are the same whatever path a request takes, at lengths around block and chunk edges, in float32.

The reference is `transformers.generate`. Random tiny models have near ties, which float32 sums in another order may
decide otherwise: prompts on whose way the two likeliest tokens come closer than `MARGIN` are drawn again.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.support.cluster import running_cluster, running_server
from tests.support.tiny_models import FAMILIES, save_tiny_model
from tests.support.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from twostroke.protocol.config import Dtype, EngineConfig, KVCacheConfig, ModelConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens
from twostroke.worker.in_process import InProcessExecutor

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

BLOCK = 16
CHUNK = 64
LENGTHS = [
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 47, CHUNK - 1, CHUNK, CHUNK + 1),
    *(CHUNK + BLOCK, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 200, 255, 256, 317, 430),
]
OUTPUT_TOKENS = 24
MARGIN = 1e-3
SEED = 20
ENGINE = {"max_batched_tokens": CHUNK, "max_sequences": 8, "kv_cache": {"block_size": BLOCK, "num_blocks": 400}}
CONFIG = {"model": {"dtype": "float32"}, "context": ENGINE, "generation": ENGINE, "aggregated": {"port": 0, **ENGINE}}


@dataclass(frozen=True)
class Case:
    """A prompt and what the reference makes of it."""

    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True)
class Family:
    """A model of one family, with reference answers."""

    folder: Path
    cases: list[Case]


def _reference(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy tokens of `transformers.generate`, and the smallest margin between the two likeliest on the way."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        min_new_tokens=OUTPUT_TOKENS,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = [float(top[0] - top[1]) for logits in result.logits for top in logits.topk(2).values]
    return result.sequences[0, len(prompt) :].tolist(), min(margins)


def _cases(folder: Path) -> list[Case]:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cases = []
    for length in LENGTHS:
        while True:
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]
            expected, margin = _reference(model, prompt)
            if margin > MARGIN:
                break
        cases.append(Case(prompt, expected))
    return cases


ALWAYS = ("llama", "qwen3")
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in sorted(FAMILIES) if name not in ALWAYS]


@pytest.fixture(scope="module", params=[*ALWAYS, *OTHERS])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tiny random model with a tokenizer, and its reference answers."""
    folder = save_tiny_model(
        tmp_path_factory.mktemp("model") / request.param, request.param, vocab_size=VOCAB_SIZE, eos_token_id=0
    )
    save_tiny_tokenizer(folder)
    return Family(folder, _cases(folder))


def _ask_all(http: str, family: Family) -> list[list[int]]:
    """Every prompt at once, so that they meet in batches."""

    def ask(case: Case) -> list[int]:
        body = {"model": family.folder.name, "prompt": case.prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        response = httpx.post(
            f"{http}/v1/completions",
            json={**body, "ignore_eos": True, "return_token_ids": True},
            timeout=120,
            trust_env=False,
        )
        assert response.status_code == httpx.codes.OK, response.text
        answer = response.json()
        assert answer["usage"]["prompt_tokens"] == len(case.prompt)
        assert answer["usage"]["completion_tokens"] == OUTPUT_TOKENS
        assert answer["choices"][0]["finish_reason"] == "length"
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(len(family.cases)) as threads:
        return list(threads.map(ask, family.cases))


def _assert_same(path: str, family: Family, ask: Callable[[], list[list[int]]]) -> None:
    """Twice: the second time the prefix caches hold the prompts."""
    for round_name in ("first", "cached"):
        for case, tokens in zip(family.cases, ask(), strict=True):
            assert tokens == case.expected, f"{path}, {round_name} round, prompt of {len(case.prompt)} tokens"


def test_in_process_tokens_are_those_of_the_reference(family: Family) -> None:
    """The engine in this process gives the tokens of `transformers.generate`."""
    engine = EngineConfig(
        max_batched_tokens=CHUNK, max_sequences=8, kv_cache=KVCacheConfig(block_size=BLOCK, num_blocks=400), threads=1
    )
    executor = InProcessExecutor.load(ModelConfig(path=str(family.folder), dtype=Dtype.FLOAT32), engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def ask() -> list[list[int]]:
        results = [
            executor.submit(
                GenerationRequest(
                    key=SequenceKey(executor.draw_client_id()), prompt_ids=pack_tokens(case.prompt), sampling=sampling
                )
            )
            for case in family.cases
        ]
        return [result.wait(60).token_ids for result in results]

    try:
        _assert_same("in-process", family, ask)
    finally:
        executor.shutdown()


def test_aggregated_tokens_are_those_of_the_reference(family: Family, tmp_path: Path) -> None:
    """`twostroke serve` gives the tokens of `transformers.generate` over HTTP."""
    with running_server(family.folder, tmp_path, CONFIG) as server:
        _assert_same("aggregated", family, lambda: _ask_all(server.http, family))


def test_disaggregated_tokens_are_those_of_the_reference(family: Family, tmp_path: Path) -> None:
    """A router, a context and a generation server give the tokens of `transformers.generate`; all blocks come back."""
    with running_cluster(family.folder, tmp_path, CONFIG) as cluster:
        _assert_same("disaggregated", family, lambda: _ask_all(cluster.http, family))
        cluster.wait_idle()
