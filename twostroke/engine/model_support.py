"""Which models are served, and the reasons why others are refused.

Served: decoder-only language models of the library that support its attention interface, whose every layer is full or
sliding-window attention with K and V of one shape.
"""

import inspect
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from twostroke.protocol.errors import ModelError

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def check_config(config: Any) -> None:
    """Refuse what config.json alone shows to be unsupported, before weights are read.

    Raises:
        ModelError: With the reason and what would be accepted.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; only decoder-only language models are served")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{name}: quantized weights are not served; give a float32 or bfloat16 checkpoint")
    text = config.get_text_config()
    if text is not config:
        raise ModelError(f"{name} has parts beside the text model (vision or audio); give a text-only checkpoint")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS)
    if others:
        raise ModelError(
            f"{name} has layers of type {', '.join(others)}; only {' and '.join(sorted(SERVED_LAYERS))} are served "
            "(no linear-attention or state-space layers)"
        )
    if not getattr(text, "num_attention_heads", None):
        raise ModelError(f"{name} has no attention heads in config.json; only attention models are served")
    _check_class(config)


def check_rope(config: Any, max_model_len: int) -> None:
    """Refuse RoPE whose frequencies would change with the longest position in the batch.

    Up to the original length they do not change, so a lower `max_model_len` pins them.

    Raises:
        ModelError: `max_model_len` is above that length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") not in _ROPE_BY_LENGTH:
            continue
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_model_len > original:
            raise ModelError(
                f"{config.model_type}: the frequencies of {rope['rope_type']} RoPE depend on the longest position in "
                f"the batch beyond {original}, so a token would depend on its batch; set model.max_model_len to at "
                f"most {original} (it is {max_model_len})"
            )


def _check_class(config: Any) -> None:
    """Refuse a model class that cannot take our attention or select positions before its head."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{config.model_type} is no causal language model of the model library; only those are served")
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{model.__name__} does not support the library's attention interface; only models that do are served"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{model.__name__} cannot select positions before its head (no `logits_to_keep`)")
