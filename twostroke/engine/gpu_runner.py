"""Runs engine steps of one model on a GPU.

Loading it:

    weights to the GPU -> the largest step over a cache of one block, measured -> the cache takes a share of what is
    left -> check against the model library's own attention -> decode steps captured as graphs

A step of decodes is a replay (`decode_graphs`); any other step starts its kernels one by one, and so does every step of
a model that cannot be captured (experts that are chosen on the host): it is served all the same, with a warning.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import structlog
import torch

from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.decode_graphs import DecodeGraphs
from twostroke.engine.device.contract import GraphDevice
from twostroke.engine.gpu_memory import count_gpu_blocks
from twostroke.engine.interfaces import CacheMemory, ModelFacts, SequenceSlice, StepPlan, StepResult
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.library_attention import forward
from twostroke.engine.model_facts import cache_geometry, model_facts
from twostroke.engine.model_loader import LoadedModel, load_model
from twostroke.engine.packing import PackedStep, pack
from twostroke.engine.prompt_scoring import score_prompts
from twostroke.engine.sampler import draws
from twostroke.engine.samplers import Sampler, sampler_for
from twostroke.engine.self_check import self_check
from twostroke.engine.token_history import TokenHistory
from twostroke.protocol.config import KVCacheConfig, ModelConfig
from twostroke.protocol.sampling import SamplingParams


class GpuRunner:
    """The `Runner` that computes a real model on a GPU. Use `GpuRunner.load`.

    Args:
        model: The loaded model, on the GPU.
        cache: Its KV cache, there too.
        sample: Samples logits there.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, sample: Sampler) -> None:
        self._model = model
        self._cache = cache
        self._sample = sample
        self._attention = TritonAttention(cache.tensor, model.config.num_attention_heads)
        self._graphs: DecodeGraphs | None = None
        self.cache: CacheMemory = cache.memory
        self.facts: ModelFacts = model_facts(model, cache.geometry)

    @classmethod
    def load(  # noqa: PLR0917 - one setting each; workers call it once
        cls,
        model: ModelConfig,
        kv: KVCacheConfig,
        max_batched_tokens: int,
        max_sequences: int,
        device: GraphDevice,
        progress: Callable[[str], None],
    ) -> Self:
        """Load a model, size its cache, check it, and capture its decode steps.

        Args:
            model: Which model, and how.
            kv: Size of the cache.
            max_batched_tokens: Tokens of a step at most.
            max_sequences: Slices of a step at most.
            device: The GPU.
            progress: Told what is being done, for people who wait.

        Raises:
            ConfigError: A setting does not go with the model or the GPU.
            ModelError: The model cannot be served.
        """
        progress(f"loading weights from {model.path}")
        loaded = load_model(model)
        loaded = replace(loaded, module=loaded.module.to(device.torch_device))
        geometry = cache_geometry(loaded, kv.block_size)
        sample = sampler_for(device.torch_device)

        progress("measuring the memory of the largest step")
        largest = largest_step(max_batched_tokens, max_sequences, loaded.max_model_len, kv.block_size)
        trial = cls(loaded, KVCache(geometry, 1, device), sample)
        step_bytes = device.peak_memory(partial(trial.run, largest))
        del trial
        blocks = count_gpu_blocks(geometry, kv, device.free_memory(), step_bytes)

        runner = cls(loaded, KVCache(geometry, blocks, device), sample)
        progress("checking attention against the model library's own")
        with torch.inference_mode():
            self_check(loaded, runner._cache, runner._attention)
        progress("capturing decode steps")
        runner.capture(device, min(max_sequences, max_batched_tokens))
        return runner

    @torch.inference_mode()
    def capture(self, device: GraphDevice, most: int) -> None:
        """Capture decode steps of up to `most` sequences, where the model allows; writes nothing into the cache."""
        module = self._model.module
        try:
            self._graphs = DecodeGraphs(
                device,
                partial(forward, module),
                self._attention,
                [*module.parameters(), *module.buffers(), self._cache.tensor],
                most,
                self._model.max_model_len,
                self._cache.geometry.block_size,
            )
        except RuntimeError as error:
            structlog.get_logger(__name__).warning(
                "decode steps cannot be captured, so each starts its kernels one by one, which is slow",
                model=type(module).__name__,
                reason=str(error),
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """See `Runner.run`."""
        step = pack(plan, self._cache.geometry.block_size)
        logits = self._logits(step)
        sampled = len(step.sampled)
        tokens = self._sample(*draws(logits[:sampled], step.sampled))
        return StepResult(tokens, score_prompts(logits[sampled:], step.scored))

    def _logits(self, step: PackedStep) -> torch.Tensor:
        if self._graphs is not None and self._graphs.fits(step):
            return self._graphs.run(step)
        return forward(self._model.module, step, self._attention.prepare(step.attention))


def largest_step(max_batched_tokens: int, max_sequences: int, max_model_len: int, block_size: int) -> StepPlan:
    """The step that takes the most memory: as many tokens as may be, each with logits; all in block 0.

    Its rows ask for every step of sampling, so that the kernels are compiled before requests come.
    """
    params = SamplingParams(
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        logprobs=1,
        prompt_logprobs=1,
    )
    decodes = min(max_sequences, max_batched_tokens) - 1
    lengths = [1] * decodes
    left = max_batched_tokens - decodes
    while left:
        lengths.append(min(left, max_model_len))
        left -= lengths[-1]
    return StepPlan(
        [
            SequenceSlice(
                request_id=0,
                token_ids=[0] * length,
                start=0,
                blocks=[0] * -(-length // block_size),
                sample=True,
                sampling=params,
                output_index=0,
                history=TokenHistory([0], [0]),
                prompt_targets=[0] * (length - 1),
            )
            for length in lengths
        ]
    )
