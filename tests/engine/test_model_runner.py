"""Whole models: packed, paged steps give the tokens and logprobs of the model library's own generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from twostroke.engine.interfaces import SampledToken, SequenceSlice, StepPlan, StepResult
from twostroke.engine.model_runner import ModelRunner
from twostroke.protocol.config import Dtype, KVCacheConfig, ModelConfig
from twostroke.protocol.prompt_logprobs import PromptTokenLogprobs
from twostroke.protocol.sampling import SamplingParams

BLOCK_SIZE = 4
NEW_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NEAR_TIE = 1e-3


@dataclass
class Run:
    """One sequence as a minimal scheduler sees it."""

    prompt: list[int]
    blocks: list[int]
    chunk: int
    sampling: SamplingParams = GREEDY
    computed: int = 0
    output: list[SampledToken] = field(default_factory=list)

    def slice(self, request_id: int) -> SequenceSlice:
        """The next chunk of the prompt, or the next decode."""
        tokens = self.prompt + [token.token_id for token in self.output]
        end = min(self.computed + self.chunk, len(self.prompt)) if self.computed < len(self.prompt) else len(tokens)
        ids = tokens[self.computed : end]
        return SequenceSlice(
            request_id, ids, self.computed, self.blocks, end == len(tokens), self.sampling, len(self.output)
        )

    @property
    def ids(self) -> list[int]:
        """The tokens made so far."""
        return [token.token_id for token in self.output]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelRunner]:
    """A tiny model of each family: its folder, and a runner for it."""
    folder = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    return folder, _load(folder)


def test_batches_match_the_library(family: tuple[Path, ModelRunner]) -> None:
    """Prompts around block and chunk edges, each with chunks of its own, in one batch: same tokens, near logprobs."""
    folder, runner = family
    library = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    lengths = ((1, 3), (4, 4), (5, 4), (16, 16), (17, 9), (31, 13))
    prompts = [_clear_prompt(library, length, seed=40 + length) for length, _ in lengths]
    runs = _runs(prompts, [chunk for _, chunk in lengths])
    _drive(runner, runs)
    for run, prompt in zip(runs, prompts, strict=True):
        expected_ids, expected_logprobs = _generate(library, prompt)
        assert run.ids == expected_ids
        ours = [token.logprobs.chosen for token in run.output if token.logprobs is not None]
        assert ours == pytest.approx(expected_logprobs, abs=1e-4)


def test_sampled_tokens_do_not_depend_on_the_batch(family: tuple[Path, ModelRunner]) -> None:
    """Random sampling: alone in one chunk, and in a batch in small chunks, a sequence gets the same tokens."""
    _, runner = family
    prompts = [_prompt(length, seed=length) for length in (3, 14, 23)]
    params = [SamplingParams(seed=row, temperature=0.8, top_p=0.9) for row in range(3)]
    together = _runs(prompts, [2, 5, 11], params)
    _drive(runner, together)
    for row in range(3):
        (alone,) = _runs(prompts[row : row + 1], [64], params[row : row + 1])
        _drive(runner, [alone])
        assert alone.ids == together[row].ids


def test_a_step_that_samples_nothing_returns_nothing(family: tuple[Path, ModelRunner]) -> None:
    """The first chunk of a prompt only fills the cache."""
    _, runner = family
    part = SequenceSlice(1, [3, 4, 5], 0, [0], False, GREEDY, 0)
    assert runner.run(StepPlan([part])) == StepResult([], [])


def test_prompt_logprobs_match_the_library_in_any_chunks(family: tuple[Path, ModelRunner]) -> None:
    """Two prompts in one batch, scored in chunks beside a decode: logprobs, ranks and likeliest tokens."""
    folder, runner = family
    library: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    prompts = [_prompt(length, seed=length) for length in (23, 17)]
    scores: dict[int, list[PromptTokenLogprobs]] = {0: [], 1: []}
    decode = SequenceSlice(2, [7], 0, [40], True, GREEDY, 0)
    for start, end in ((0, 1), (1, 12), (12, 17), (17, 23)):
        slices = [
            SequenceSlice(row, ids[start:end], start, range(row * 8, row * 8 + 8), end == len(ids), params, 0,
                          prompt_targets=ids[start + 1 : end + 1])
            for row, ids in enumerate(prompts) if start < len(ids)
        ]  # fmt: skip
        for part in runner.run(StepPlan([decode, *slices])).prompt_scores:
            assert part.start == start
            scores[part.request_id] += part.logprobs.unpack()
    for row, ids in enumerate(prompts):
        with torch.inference_mode():
            raw = library(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        assert len(scores[row]) == len(ids) - 1
        for position, token in enumerate(scores[row], 1):
            expected = raw[position - 1]
            assert token.chosen == pytest.approx(float(expected[ids[position]]), abs=1e-4)
            assert token.top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
            assert expected[list(token.top_ids)].tolist() == pytest.approx(token.top, abs=1e-4)
            assert float(expected.sort(descending=True).values[token.rank - 1]) == pytest.approx(token.chosen, abs=1e-4)


def test_bfloat16_runs_and_stays_near_float32(tmp_path: Path) -> None:
    """In bfloat16 the first token's logprob is within 0.2 of float32's."""
    folder = save_tiny_model(tmp_path)
    chosen = []
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        runner = _load(folder, dtype=dtype)
        assert runner.facts.layout.dtype == dtype.value
        part = SequenceSlice(1, _prompt(13, seed=2), 0, [3, 2, 1, 0], True, GREEDY, 0)
        (token,) = runner.run(StepPlan([part])).tokens
        assert token.logprobs is not None
        chosen.append(token.logprobs.top[0])
    assert chosen[0] == pytest.approx(chosen[1], abs=0.2)


def test_facts_describe_model_and_cache(tmp_path: Path) -> None:
    """Sizes, end-of-sequence ids and the layout come from the folder and the settings."""
    runner = _load(save_tiny_model(tmp_path), max_model_len=100)
    facts = runner.facts
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (VOCAB_SIZE, 100, (1,))
    assert (facts.layout.layers, facts.layout.kv_heads, facts.layout.head_dim) == (2, 2, 16)
    assert facts.layout.block_size == BLOCK_SIZE
    assert facts.block_bytes == runner.cache.block_bytes == 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
    assert runner.cache.num_blocks == 64


def _load(folder: Path, **settings: Any) -> ModelRunner:
    model = ModelConfig(path=str(folder), **settings)
    kv = KVCacheConfig(num_blocks=64, block_size=BLOCK_SIZE)
    return ModelRunner.load(model, kv, max_batched_tokens=256, max_sequences=8, threads=1, progress=lambda _: None)


def _runs(prompts: Sequence[list[int]], chunks: Sequence[int], params: Sequence[SamplingParams] = ()) -> list[Run]:
    """Sequences with scattered blocks of their own."""
    free = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    runs = []
    for row, (prompt, chunk) in enumerate(zip(prompts, chunks, strict=True)):
        blocks = [free.pop() for _ in range(-(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE))]
        runs.append(Run(prompt, blocks, chunk, params[row] if params else GREEDY))
    return runs


def _drive(runner: ModelRunner, runs: list[Run]) -> None:
    """Step until every sequence has its tokens: decodes first, then chunks, as a scheduler would."""
    while active := [row for row, run in enumerate(runs) if len(run.output) < NEW_TOKENS]:
        slices = sorted((runs[row].slice(row) for row in active), key=lambda part: len(part.token_ids) > 1)
        for token in runner.run(StepPlan(slices)).tokens:
            runs[token.request_id].output.append(token)
        for part in slices:
            runs[part.request_id].computed += len(part.token_ids)


def _prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.inference_mode()
def _clear_prompt(library: Any, length: int, seed: int) -> list[int]:
    """A prompt whose greedy continuation has no near tie; drawn again until it is so."""
    while True:
        prompt = _prompt(length, seed)
        ids, _ = _generate(library, prompt)
        logits = library(torch.tensor([prompt + ids])).logits[0, length - 1 : -1]
        top = logits.topk(2, dim=-1).values
        if float((top[:, 0] - top[:, 1]).min()) > NEAR_TIE:
            return prompt
        seed += 1000


@torch.inference_mode()
def _generate(library: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs from the library's own generation."""
    library.generation_config.eos_token_id = None
    result = library.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = result.sequences[0, len(prompt) :].tolist()
    logprobs = [float(row[0].float().log_softmax(-1)[token]) for row, token in zip(result.logits, ids, strict=True)]
    return ids, logprobs
