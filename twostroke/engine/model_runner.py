"""Runs engine steps on one loaded model: pack, forward, sample and score.

A step is one forward pass over all its tokens, packed into one row; there is no loop over sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch

from twostroke.engine.attention.choice import make_attention
from twostroke.engine.attention.contract import AttentionBackend
from twostroke.engine.cpu_model.forward import CompiledDecoder
from twostroke.engine.cpu_model.plain_decoder import read_plain_decoder
from twostroke.engine.interfaces import CacheMemory, SequenceSlice, StepPlan, StepResult
from twostroke.engine.kv_cache import KVCache, count_blocks
from twostroke.engine.library_attention import StepForward, forward
from twostroke.engine.model_facts import cache_geometry, model_facts
from twostroke.engine.model_loader import LoadedModel, load_model
from twostroke.engine.packing import pack
from twostroke.engine.prompt_scoring import score_prompts
from twostroke.engine.sampler import draws
from twostroke.engine.samplers import sampler_for
from twostroke.engine.self_check import check_forward, self_check
from twostroke.protocol.config import KVCacheConfig, ModelConfig
from twostroke.protocol.sampling import SamplingParams


class ModelRunner:
    """The `Runner` that computes a real model on the CPU. Use `ModelRunner.load`.

    Args:
        model: The loaded model.
        cache: Its KV cache.
        attention: Attention over `cache`.
        run: Runs the model's layers.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, attention: AttentionBackend, run: StepForward) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._forward = run
        self._sample = sampler_for(cache.tensor.device)
        self.cache: CacheMemory = cache.memory
        self.facts = model_facts(model, cache.geometry)

    @classmethod
    def load(  # noqa: PLR0917 - one setting each; workers call it once
        cls,
        model: ModelConfig,
        kv: KVCacheConfig,
        max_batched_tokens: int,
        max_sequences: int,
        threads: int | None,
        progress: Callable[[str], None],
    ) -> Self:
        """Load a model, size its cache, compile, and check it.

        Args:
            model: Which model, and how.
            kv: Size of the cache.
            max_batched_tokens: Tokens of a step at most.
            max_sequences: Slices of a step at most.
            threads: CPU threads; None takes all cores.
            progress: Told what is being done, for people who wait.

        Raises:
            ConfigError: A setting does not go with the model or the host.
            ModelError: The model cannot be served.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        progress(f"loading weights from {model.path}")
        loaded = load_model(model)
        geometry = cache_geometry(loaded, kv.block_size)
        cache = KVCache(geometry, count_blocks(geometry, kv))
        attention = make_attention(cache.tensor, loaded.config.num_attention_heads, torch.get_num_threads())
        progress("compiling attention and checking it against the model library's own")
        with torch.inference_mode():
            run = _checked_forward(loaded, cache, attention)
        runner = cls(loaded, cache, attention, run)
        progress("warming up")
        runner.warm_up(max_batched_tokens, max_sequences)
        return runner

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        step = pack(plan, self._cache.geometry.block_size)
        logits = self._forward(step, self._attention.prepare(step.attention))
        sampled = len(step.sampled)
        tokens = self._sample(*draws(logits[:sampled], step.sampled))
        return StepResult(tokens, score_prompts(logits[sampled:], step.scored))

    def warm_up(self, max_batched_tokens: int, max_sequences: int) -> None:
        """Run a full batch of decodes and a chunk: libraries then choose and compile code before requests come.

        Overwrites block 0, so it belongs before the first request.
        """
        params = SamplingParams()
        decodes = min(max_sequences, max_batched_tokens)
        chunk = min(max_batched_tokens, self._model.max_model_len, self._cache.geometry.block_size)
        for length, count in ((1, decodes), (chunk, 1)):
            part = SequenceSlice(0, [0] * length, 0, [0], sample=True, sampling=params, output_index=0)
            self.run(StepPlan([part] * count))


def _checked_forward(model: LoadedModel, cache: KVCache, attention: AttentionBackend) -> StepForward:
    """The fastest way through the model's layers that there is, after it has passed its check."""
    checked = self_check(model, cache, attention)
    plain = read_plain_decoder(model.module, checked.forms)
    if plain is None:
        return partial(forward, model.module)
    compiled = CompiledDecoder(plain, model.dtype, torch.get_num_threads())
    check_forward(model, cache, attention, compiled, checked)
    return compiled
