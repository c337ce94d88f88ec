"""Layers between compiled loops give the logits of the library's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import save_tiny_model
from twostroke.engine.attention.reference import ReferenceAttention
from twostroke.engine.cpu_model import forward as cpu_forward
from twostroke.engine.cpu_model.forward import CompiledDecoder
from twostroke.engine.cpu_model.plain_decoder import read_plain_decoder
from twostroke.engine.cpu_model.products import ProductMaker, WideningProducts, library_product
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.library_attention import forward
from twostroke.engine.model_facts import cache_geometry
from twostroke.engine.model_loader import LoadedModel, load_model
from twostroke.engine.packing import PackedStep, pack
from twostroke.engine.self_check import Checked, check_forward, self_check
from twostroke.engine.sharing import Team
from twostroke.protocol.config import ModelConfig
from twostroke.protocol.errors import ModelError
from twostroke.protocol.sampling import SamplingParams

BLOCK_SIZE = 4
PLAIN = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("family", "changes"), PLAIN)
@pytest.mark.parametrize("threads", [1, 2])
def test_float32_logits_are_the_librarys(tmp_path: Path, family: str, changes: dict[str, Any], threads: int) -> None:
    """A chunk and two decodes in one step, with the logits of some tokens; and the library's layers still work."""
    model, cache, checked = _load(tmp_path, family, torch.float32, **changes)
    attention = ReferenceAttention(cache.tensor)
    step = _step()
    with torch.inference_mode():
        expected = forward(model.module, step, attention.prepare(step.attention))
        plain = read_plain_decoder(model.module, checked.forms)
        assert plain is not None
        ours = CompiledDecoder(plain, torch.float32, threads)(step, attention.prepare(step.attention))
        again = forward(model.module, step, attention.prepare(step.attention))
    assert torch.allclose(ours, expected, rtol=0, atol=3e-5)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("widening", [False, True])
def test_bfloat16_logits_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, widening: bool) -> None:
    """Both ways of matrix products, whatever this processor would choose, are as near as the check at load asks."""
    makers = {
        False: ProductMaker(torch.bfloat16, library_product),
        True: ProductMaker(torch.float32, WideningProducts(Team(1)).make),
    }
    monkeypatch.setattr(cpu_forward, "choose_products", lambda *_: makers[widening])
    model, cache, checked = _load(tmp_path, "qwen3", torch.bfloat16)
    with torch.inference_mode():
        plain = read_plain_decoder(model.module, checked.forms)
        assert plain is not None
        run = CompiledDecoder(plain, torch.bfloat16, threads=1)
        check_forward(model, cache, ReferenceAttention(cache.tensor), run, checked)


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    """The check at load compares the compiled layers with the library's."""
    model, cache, checked = _load(tmp_path, "llama", torch.float32)
    module: Any = model.module
    with torch.inference_mode():
        plain = read_plain_decoder(module, checked.forms)
        assert plain is not None
        plain.layers[1].inner_norm.mul_(1.5)
        run = CompiledDecoder(plain, torch.float32, threads=1)
        with pytest.raises(ModelError, match="logits of the compiled layers differ from the library's by"):
            check_forward(model, cache, ReferenceAttention(cache.tensor), run, checked)


@pytest.mark.parametrize(("family", "changes"), [("gemma2", {}), ("mixtral", {}), ("llama", {"hidden_act": "gelu"})])
def test_other_forms_are_left_to_the_library(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Norms after attention, experts, another activation."""
    model, _, checked = _load(tmp_path, family, torch.float32, **changes)
    assert read_plain_decoder(model.module, checked.forms) is None


def _load(folder: Path, family: str, dtype: torch.dtype, **changes: Any) -> tuple[LoadedModel, KVCache, Checked]:
    model = load_model(ModelConfig(path=str(save_tiny_model(folder, family, dtype=dtype, **changes))))
    cache = KVCache(cache_geometry(model, BLOCK_SIZE), 16)
    with torch.inference_mode():
        return model, cache, self_check(model, cache, ReferenceAttention(cache.tensor))


def _step() -> PackedStep:
    """Two decodes and a chunk of 21 tokens; the last one's logits and those of a few prompt tokens are kept."""
    greedy = SamplingParams(temperature=0.0)
    chunk = [(5 + 11 * at) % 200 for at in range(21)]
    slices = (
        SequenceSlice(0, [7], 0, [0], sample=True, sampling=greedy, output_index=0),
        SequenceSlice(1, [9], 0, [1], sample=True, sampling=greedy, output_index=0),
        SequenceSlice(2, chunk, 0, [2, 3, 4, 5, 6, 7], True, greedy, 0, prompt_targets=chunk[1:4]),
    )
    return pack(StepPlan(slices), BLOCK_SIZE)
