"""Which models are refused, by config or by what their attention asks for."""

import re
from typing import Any

import pytest
import torch
import transformers

from twostroke.engine.library_attention import attend
from twostroke.engine.model_support import check_config, check_rope
from twostroke.protocol.errors import ModelError

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "awq"}}
REFUSED = [
    (transformers.T5Config(), "t5 is an encoder-decoder model"),
    (transformers.MambaConfig(), "mamba has layers of type linear_attention"),
    (transformers.Qwen3NextConfig(**SIZES), "qwen3_next has layers of type linear_attention"),
    (transformers.Llama4TextConfig(**SIZES), "llama4_text has layers of type chunked_attention"),
    (transformers.Gemma3Config(), "gemma3 has parts beside the text model"),
    (transformers.BloomConfig(), "BloomForCausalLM does not support the library's attention interface"),
    (transformers.LlamaConfig(**QUANTIZED), "quantized weights are not served"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: getattr(value, "model_type", None))
def test_configs_are_refused_with_the_reason(config: Any, reason: str) -> None:
    """Each unsupported kind of model says why, before weights are read."""
    with pytest.raises(ModelError, match=re.escape(reason)):
        check_config(config)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_pinned_by_a_lower_length(rope_type: str) -> None:
    """Up to the original length frequencies are fixed; beyond it the model is refused."""
    rope = {
        "rope_type": rope_type,
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 128,
    }
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=512, rope_parameters=rope)
    check_rope(config, 128)
    with pytest.raises(ModelError, match=rf"{rope_type} RoPE .* at most 128 \(it is 129\)"):
        check_rope(config, 129)


@pytest.mark.parametrize(
    "argument", [{"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}, {"is_causal": False}, {"dropout": 0.1}]
)
def test_unknown_attention_arguments_are_refused_by_name(argument: dict[str, Any]) -> None:
    """Attention sinks, biases and the like are never ignored."""
    with pytest.raises(ModelError, match=f"not supported: {next(iter(argument))};"):
        _attend(**argument)


def test_arguments_without_effect_are_ignored() -> None:
    """None asks for nothing, and position ids matter to RoPE alone."""
    output, weights = _attend(s_aux=None, position_ids=torch.zeros(1), use_cache=False)
    assert output.shape == (1, 3, 2, 4)
    assert weights is None


def _attend(**arguments: Any) -> tuple[torch.Tensor, None]:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]  # as the library's attention modules have it
    query = torch.zeros(1, 2, 3, 4)
    return attend(module, query, query, query, None, twostroke_step=lambda _layer, query, *_: query, **arguments)
