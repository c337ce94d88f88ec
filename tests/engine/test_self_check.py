"""The check at load finds attention that differs from the library's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import save_tiny_model
from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, StepAttention
from twostroke.engine.attention.reference import ReferenceAttention
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.model_facts import cache_geometry
from twostroke.engine.model_loader import LoadedModel, load_model
from twostroke.engine.self_check import self_check
from twostroke.protocol.config import ModelConfig
from twostroke.protocol.errors import ModelError


class _WrongScale:
    """Attention that loses the model's scale."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._right = ReferenceAttention(cache)

    def prepare(self, batch: AttentionBatch) -> StepAttention:
        """A step that ignores the scale asked for."""
        step = self._right.prepare(batch)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
        ) -> torch.Tensor:
            return step(layer, query, key, value, AttentionForm(2 * form.scale, form.window, form.softcap))

        return attend


def test_right_attention_passes(tmp_path: Path) -> None:
    """The reference passes, and leaves the model with our attention plugged in."""
    model, cache = _load(tmp_path, "gemma2")
    self_check(model, cache, ReferenceAttention(cache.tensor))
    module: Any = model.module
    assert module.config._attn_implementation == "twostroke"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_attention_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A lost scale shows in the logits, in both dtypes."""
    model, cache = _load(tmp_path, "llama", dtype)
    with pytest.raises(ModelError, match="logits under paged attention differ from the library"):
        self_check(model, cache, _WrongScale(cache.tensor))


def test_a_window_that_layers_do_not_ask_for_is_refused(tmp_path: Path) -> None:
    """Logits of a short run cannot show a lost window longer than the run, so windows are compared by number."""
    model, cache = _load(tmp_path, "mistral")
    model.config.layer_types = ["full_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer 0 asks for a sliding window of 11, but config.json says None"):
        self_check(model, cache, ReferenceAttention(cache.tensor))


def test_a_cache_too_small_for_the_check_is_refused(tmp_path: Path) -> None:
    """The message says how many blocks are needed."""
    model, _ = _load(tmp_path, "llama")
    cache = KVCache(cache_geometry(model, 4), 3)
    with pytest.raises(ModelError, match=r"needs 11 blocks, not 3"):
        self_check(model, cache, ReferenceAttention(cache.tensor))


def _load(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> tuple[LoadedModel, KVCache]:
    model = load_model(ModelConfig(path=str(save_tiny_model(folder, family, dtype=dtype))))
    return model, KVCache(cache_geometry(model, 4), 16)
