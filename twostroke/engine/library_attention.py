"""Plugs our attention into the model library (transformers).

`register()` adds one attention function under the name `twostroke`; a model loaded with that name calls it in every
layer. The step's prepared attention travels as an extra keyword argument of the model call (`STEP_ARGUMENT`), which the
library hands down untouched. The library makes no mask for a name that it does not know: what a token may see is ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twostroke.engine.attention.contract import AttentionForm, StepAttention
from twostroke.engine.packing import PackedStep
from twostroke.protocol.errors import ModelError

ATTENTION_NAME = "twostroke"
STEP_ARGUMENT = "twostroke_step"
HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Arguments that attention functions of the library receive and rightly ignore: they matter elsewhere."""

StepForward = Callable[[PackedStep, StepAttention], torch.Tensor]
"""From a packed step and its attention to the logits [kept, vocabulary] of the tokens in `kept`."""


def register() -> None:
    """Make `attn_implementation="twostroke"` known to the library; may be called again."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)


def forward(module: torch.nn.Module, step: PackedStep, attend_step: StepAttention) -> torch.Tensor:
    """Run a model over a packed step, on the model's device.

    Returns:
        The logits [kept, vocabulary] of the tokens in `step.kept`.
    """
    device = next(module.parameters()).device
    output = module(
        input_ids=step.token_ids.to(device),
        position_ids=step.positions.to(device),
        use_cache=False,
        logits_to_keep=step.kept.to(device),
        **{STEP_ARGUMENT: attend_step},
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    twostroke_step: StepAttention,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of every layer; all tensors are [1, heads or kv_heads, tokens, head_dim].

    Returns:
        The output as [1, tokens, heads, head_dim], and no attention weights.

    Raises:
        ModelError: The model asks for something that our attention does not do.
    """
    if attention_mask is not None or dropout or is_causal is False or others.keys() - HARMLESS_ARGUMENTS:
        _refuse(attention_mask, dropout, is_causal, others)
    form = AttentionForm(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    output = twostroke_step(
        module.layer_idx,  # type: ignore[arg-type]  # an int in every model that passes `check_support`
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        form,
    )
    return output[None], None


def _refuse(
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,  # noqa: FBT001 - the library's argument, passed on
    others: dict[str, Any],
) -> None:
    """Raise for the first argument that changes attention in a way that we do not support."""
    unsupported = {
        name: value for name, value in others.items() if value is not None and name not in HARMLESS_ARGUMENTS
    }
    if attention_mask is not None:
        unsupported["attention_mask"] = attention_mask
    if dropout:
        unsupported["dropout"] = dropout
    if is_causal is False:
        unsupported["is_causal"] = is_causal
    if unsupported:
        names = ", ".join(sorted(unsupported))
        raise ModelError(
            f"the model gives its attention these arguments, which are not supported: {names}; supported are causal "
            "attention with a scale, a sliding window and a soft cap"
        )
