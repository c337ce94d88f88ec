"""Recognises models whose decoder layers have the plain form, and takes their weights.

    x += output(attention(rotate(qkv(norm(x)))))       with or without norms of each query and key head
    x += down(silu(gate(norm(x))) * up(norm(x)))

Only known classes are taken: a class with the same names could compute something else. The projections that read the
same rows are joined into one matrix; the library's modules keep working, on parts of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.engine.attention.contract import AttentionForm

_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix product of a layer.

    Attributes:
        weight: [outputs, inputs], contiguous.
        bias: [outputs], or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """What one layer computes with.

    Attributes:
        input_norm: float32 [hidden]: weight of the norm before attention.
        joined: Query, key and value, one after another.
        head_norms: float32 [2, head_dim]: weights of the norms of query and key heads; None without them.
        output: Back from the heads.
        inner_norm: float32 [hidden]: weight of the norm before gate and up.
        gate_up: Gate, then up.
        down: Back from them.
        form: How the layer attends.
    """

    input_norm: torch.Tensor
    joined: Projection
    head_norms: torch.Tensor | None
    output: Projection
    inner_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    form: AttentionForm


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """A whole model of the plain form.

    Attributes:
        embed: Token ids [...] to rows [..., hidden].
        rotary: `rotary(row, positions)` gives cosines and sines [1, tokens, head_dim].
        layers: In order.
        norm: float32 [hidden]: weight of the last norm.
        head: Rows to logits.
        epsilon: Of all norms.
        heads: Query heads.
        kv_heads: KV heads.
        head_dim: Elements of a head.
    """

    embed: Any
    rotary: Any
    layers: Sequence[PlainLayer]
    norm: torch.Tensor
    head: Projection
    epsilon: float
    heads: int
    kv_heads: int
    head_dim: int


def read_plain_decoder(module: Any, forms: Mapping[int, AttentionForm]) -> PlainDecoder | None:
    """The weights of a model of the plain form; None for any other.

    Args:
        module: The library's causal language model; its projections become parts of joined ones.
        forms: By layer, how the library's layer attends.
    """
    config = module.config
    if type(module).__name__ not in _CLASSES or config.hidden_act != "silu":
        return None
    layers = [_read_layer(layer, forms[index]) for index, layer in enumerate(module.model.layers)]
    attention = module.model.layers[0].self_attn
    return PlainDecoder(
        embed=module.model.embed_tokens,
        rotary=module.model.rotary_emb,
        layers=layers,
        norm=_norm_weight(module.model.norm),
        head=Projection(module.lm_head.weight, module.lm_head.bias),
        epsilon=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
    )


def _read_layer(layer: Any, form: AttentionForm) -> PlainLayer:
    attention, inner = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = torch.stack([_norm_weight(attention.q_norm), _norm_weight(attention.k_norm)])
    return PlainLayer(
        input_norm=_norm_weight(layer.input_layernorm),
        joined=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        output=_join(attention.o_proj),
        inner_norm=_norm_weight(layer.post_attention_layernorm),
        gate_up=_join(inner.gate_proj, inner.up_proj),
        down=_join(inner.down_proj),
        form=form,
    )


def _norm_weight(norm: Any) -> torch.Tensor:
    weight: torch.Tensor = norm.weight.detach().float()
    return weight


def _join(*linears: Any) -> Projection:
    """One projection of several with the same inputs, which from now on are parts of it."""
    if len(linears) == 1:
        return Projection(linears[0].weight.detach(), linears[0].bias)
    weight = torch.cat([one.weight.detach() for one in linears])
    bias = None if linears[0].bias is None else torch.cat([one.bias.detach() for one in linears])
    parts = torch.split(weight, [one.out_features for one in linears])
    for one, part in zip(linears, parts, strict=True):
        one.weight = torch.nn.Parameter(part, requires_grad=False)
    return Projection(weight, bias)
