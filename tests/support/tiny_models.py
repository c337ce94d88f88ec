"""Tiny random models of real families, made on the spot.

Their vocabulary is small and their weights are spread wide, so that logits differ clearly and greedy tokens are stable.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 256
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**COMMON, **changes})


def _qwen2(**changes: Any) -> Any:
    return transformers.Qwen2Config(**{**COMMON, **changes})


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Config(**{**COMMON, "head_dim": 24, **changes})


def _gemma2(**changes: Any) -> Any:
    own = {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return transformers.Gemma2Config(**{**COMMON, **own, **changes})


def _mistral(**changes: Any) -> Any:
    return transformers.MistralConfig(**{**COMMON, "sliding_window": 11, **changes})


def _gemma3(**changes: Any) -> Any:
    own = {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return transformers.Gemma3TextConfig(**{**COMMON, **own, **changes})


def _phi3(**changes: Any) -> Any:
    return transformers.Phi3Config(**{**COMMON, "sliding_window": 13, **changes})


def _mixtral(**changes: Any) -> Any:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**{**COMMON, **own, **changes})


def _qwen3_moe(**changes: Any) -> Any:
    own = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return transformers.Qwen3MoeConfig(**{**COMMON, **own, **changes})


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen3_moe": _qwen3_moe,
}
"""Config makers by family; keyword arguments replace single settings."""


def save_tiny_model(
    folder: Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Save a random model of `family` as a Hugging Face folder (no tokenizer) and return the folder.

    Args:
        folder: Where to; made if missing.
        family: A key of `FAMILIES`.
        seed: Seeds the weights.
        dtype: Of the saved weights.
        changes: Config settings to replace, for example `num_hidden_layers=1`.
    """
    config = FAMILIES[family](**changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        library: Any = transformers
        model = library.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    return folder
