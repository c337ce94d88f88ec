"""Checks a model at load: two short sequences through our packed, paged attention against the library's own.

It catches what no list of refusals can: a family whose attention differs in a way that its arguments do not show. It
also compiles what is compiled, so that the first request does not wait for it.

    step 1:  a chunk of the first sequence, a chunk of the second
    step 2:  the first's last token (a decode), the rest of the second (a chunk over a cached prefix)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.engine.attention.contract import AttentionBackend, AttentionForm, StepAttention
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.library_attention import ATTENTION_NAME, StepForward, forward
from twostroke.engine.model_loader import LoadedModel
from twostroke.engine.packing import SHORT_SLICE, PackedStep, pack
from twostroke.protocol.errors import ModelError
from twostroke.protocol.sampling import SamplingParams

_LENGTHS = (2 * SHORT_SLICE + 1, 3 * SHORT_SLICE)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Root mean square of the logits' differences at most, in standard deviations of the logits.

Wrong attention gives about 1. In bfloat16 two right ones differ by up to 0.1 after some tens of layers (measured).
"""


class _Recorder:
    """Passes a step's attention through and notes how each layer asked for it."""

    def __init__(self, step: StepAttention, cache: KVCache) -> None:
        self._step = step
        self._head_shape = (cache.geometry.kv_heads, cache.geometry.head_dim)
        self._layers = cache.geometry.layers
        self.forms: dict[int, AttentionForm] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """See `StepAttention`."""
        for name, tensor in (("K", key), ("V", value)):
            if tuple(tensor.shape[1:]) != self._head_shape:
                raise ModelError(
                    f"layer {layer} has {name} of {tuple(tensor.shape[1:])} (heads, elements), but config.json says "
                    f"{self._head_shape}; only models whose K and V have one shape in all layers are served"
                )
        if not 0 <= layer < self._layers or layer in self.forms:
            raise ModelError(f"attention layer {layer} runs twice or is not among config.json's {self._layers} layers")
        self.forms[layer] = form
        return self._step(layer, query, key, value, form)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check found out.

    Attributes:
        forms: By layer, how it attends.
        logits: [2, vocabulary]: the library's, of both sequences' last tokens.
    """

    forms: Mapping[int, AttentionForm]
    logits: torch.Tensor


def self_check(model: LoadedModel, cache: KVCache, attention: AttentionBackend) -> Checked:
    """Compare a short packed run with the library's eager attention; overwrites blocks of `cache`.

    Raises:
        ModelError: The model does not run with our attention, or its logits differ.
    """
    forms: dict[int, AttentionForm] = {}

    def recorded(step: PackedStep, attend: StepAttention) -> torch.Tensor:
        recorder = _Recorder(attend, cache)
        logits = forward(model.module, step, recorder)
        _check_windows(model, recorder.forms)
        forms.update(recorder.forms)
        return logits

    try:
        ours = _packed_logits(model, cache, attention, recorded)
        theirs = _library_logits(model)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelError(f"{_name(model)} does not run with paged attention: {error}") from error
    difference = _difference(ours, theirs)
    if not difference <= TOLERANCES[model.dtype]:  # also catches NaN
        raise ModelError(
            f"{_name(model)}: logits under paged attention differ from the library's own by {difference:.3g} standard "
            f"deviations ({_allowed(model)}); its attention does something that its arguments do not show"
        )
    return Checked(forms, theirs)


def check_forward(
    model: LoadedModel, cache: KVCache, attention: AttentionBackend, run: StepForward, checked: Checked
) -> None:
    """Compare layers of our own with the library's in the same way.

    Raises:
        ModelError: Their logits differ.
    """
    difference = _difference(_packed_logits(model, cache, attention, run), checked.logits)
    if not difference <= TOLERANCES[model.dtype]:
        raise ModelError(
            f"{_name(model)}: logits of the compiled layers differ from the library's by {difference:.3g} standard "
            f"deviations ({_allowed(model)}); the library's layers have changed, or hold something of their own"
        )


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The larger row's root mean square of the difference, in standard deviations."""
    return float(((ours - theirs).square().mean(dim=-1).sqrt() / theirs.std(dim=-1)).max())


def _allowed(model: LoadedModel) -> str:
    return f"at most {TOLERANCES[model.dtype]:g} in {str(model.dtype).removeprefix('torch.')}"


def _packed_logits(model: LoadedModel, cache: KVCache, attention: AttentionBackend, run: StepForward) -> torch.Tensor:
    """Logits [2, vocabulary] of both sequences' last tokens, after the two steps."""
    first, second = _token_ids(model)
    block_size = cache.geometry.block_size
    blocks = -(-len(first) // block_size) + -(-len(second) // block_size)
    if blocks > cache.num_blocks:
        raise ModelError(f"kv_cache.num_blocks: the check at load needs {blocks} blocks, not {cache.num_blocks}")
    tables = list(range(-(-len(first) // block_size))), list(range(-(-len(first) // block_size), blocks))
    half = len(second) // 2
    steps = (
        (_part(first[:-1], 0, tables[0]), _part(second[:half], 0, tables[1])),
        (_part(first[-1:], len(first) - 1, tables[0]), _part(second[half:], half, tables[1])),
    )
    for parts in steps:
        packed = pack(StepPlan(parts), block_size)
        logits = run(packed, attention.prepare(packed.attention))
    return logits.float()


def _library_logits(model: LoadedModel) -> torch.Tensor:
    """The same logits from the library's eager attention, one sequence at a time."""
    module: Any = model.module
    module.set_attn_implementation("eager")
    try:
        rows = [
            module(input_ids=torch.tensor([ids], device=module.device), use_cache=False, logits_to_keep=1).logits[0, -1]
            for ids in _token_ids(model)
        ]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return torch.stack(rows).float()


def _check_windows(model: LoadedModel, forms: dict[int, AttentionForm]) -> None:
    """Compare the windows that layers asked for with config.json's: a short run cannot show a lost window."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    for layer in range(config.num_hidden_layers):
        if layer not in forms:
            raise ModelError(f"{_name(model)}: layer {layer} does not use the library's attention interface")
        expected = None if kinds is not None and kinds[layer] != "sliding_attention" else window
        if forms[layer].window != expected:
            raise ModelError(
                f"{_name(model)}: layer {layer} asks for a sliding window of {forms[layer].window}, but config.json "
                f"says {expected}"
            )


def _token_ids(model: LoadedModel) -> list[list[int]]:
    """Fixed, spread-out token ids of the two sequences, cut to the model's length."""
    lengths = [min(length, model.max_model_len) for length in _LENGTHS]
    return [[(7 + 31 * at + 17 * row) % model.config.vocab_size for at in range(n)] for row, n in enumerate(lengths)]


def _part(token_ids: list[int], start: int, blocks: list[int]) -> SequenceSlice:
    greedy = SamplingParams(temperature=0.0)
    return SequenceSlice(0, token_ids, start, blocks, sample=True, sampling=greedy, output_index=0)


def _name(model: LoadedModel) -> str:
    return type(model.module).__name__
