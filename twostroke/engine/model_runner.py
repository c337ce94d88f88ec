"""Runs engine steps on one loaded model: pack, forward, sample.

A step is one forward pass over all its tokens, packed into one row; there is no loop over sequences.
"""

from collections.abc import Callable
from typing import Self

import torch

from twostroke.engine.attention.contract import AttentionBackend
from twostroke.engine.attention.reference import ReferenceAttention
from twostroke.engine.interfaces import CacheMemory, ModelFacts, SampledToken, StepPlan
from twostroke.engine.kv_cache import CacheGeometry, KVCache, count_blocks
from twostroke.engine.library_attention import STEP_ARGUMENT
from twostroke.engine.model_loader import LoadedModel, load_model
from twostroke.engine.packing import pack
from twostroke.engine.sampler import sample
from twostroke.protocol.config import KVCacheConfig, ModelConfig
from twostroke.protocol.transfer import LayoutFingerprint


class ModelRunner:
    """The `Runner` that computes a real model on the CPU. Use `ModelRunner.load`.

    Args:
        model: The loaded model.
        cache: Its KV cache.
        attention: Attention over `cache`.
    """

    def __init__(self, model: LoadedModel, cache: KVCache, attention: AttentionBackend) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self.cache: CacheMemory = cache.memory
        self.facts = _facts(model, cache.geometry)

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
        return cls(loaded, cache, ReferenceAttention(cache.tensor))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[SampledToken]:
        """See `Runner.run`."""
        step = pack(plan, self._cache.geometry.block_size)
        attend = self._attention.prepare(step.attention)
        output = self._model.module(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.sampled,
            **{STEP_ARGUMENT: attend},
        )
        return sample(output.logits[0], step.slices)


def cache_geometry(model: LoadedModel, block_size: int) -> CacheGeometry:
    """Sizes of one block of `model`'s KV cache."""
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return CacheGeometry(kv_heads, config.num_hidden_layers, block_size, head_dim, model.dtype)


def _facts(model: LoadedModel, geometry: CacheGeometry) -> ModelFacts:
    layout = LayoutFingerprint(
        model=model.digest,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=geometry.block_size,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
    )
    return ModelFacts(
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        layout=layout,
        block_bytes=geometry.block_bytes,
    )
