"""Llamas with random weights, made on the device: every process that asks for one gets the same."""

from typing import Any

import torch
import transformers

from benchmarks.gpu.machine import Machine
from twostroke.engine.gpu_runner import GpuRunner
from twostroke.engine.kv_cache import CacheGeometry, KVCache
from twostroke.engine.library_attention import ATTENTION_NAME, register
from twostroke.engine.model_facts import cache_geometry
from twostroke.engine.model_loader import LoadedModel
from twostroke.engine.triton_sampling import TritonSampler

BLOCK_SIZE = 16
_SEED = 20261130
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def make_llama(machine: Machine, max_model_len: int) -> LoadedModel:
    """Llama 3's 8 B shape in bfloat16; in rehearsal a tiny one in float32."""
    register()
    library: Any = transformers
    sizes = TINY if machine.rehearses else LLAMA_8B
    dtype = torch.float32 if machine.rehearses else torch.bfloat16
    config = library.LlamaConfig(**sizes, rope_theta=500000.0, tie_word_embeddings=False)
    torch.manual_seed(_SEED)
    with torch.device(machine.torch_device):
        module = library.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    module = module.eval().requires_grad_(False)
    return LoadedModel(module, module.config, f"random-{_SEED}", dtype, max_model_len, ())


def make_cache(machine: Machine, model: LoadedModel, tokens: int) -> KVCache:
    """A cache for so many tokens."""
    geometry: CacheGeometry = cache_geometry(model, BLOCK_SIZE)
    return KVCache(geometry, -(-tokens // BLOCK_SIZE), machine.open_device())


def make_runner(machine: Machine, model: LoadedModel, cache: KVCache) -> GpuRunner:
    """The GPU's runner; under the interpreter too, with the GPU's sampler."""
    return GpuRunner(model, cache, TritonSampler(machine.torch_device))


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of the weights that a decode step reads: all but the table of token embeddings."""
    module: Any = model.module
    embedding = module.get_input_embeddings().weight
    return sum(weight.nbytes for weight in module.parameters() if weight is not embedding)


def step_flops(model: LoadedModel, tokens: int) -> float:
    """Operations of a prefill of `tokens` tokens with one row of logits: matrix products and causal attention."""
    module: Any = model.module
    config: Any = model.config
    unused = (module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    weights = sum(weight.numel() for weight in module.parameters() if all(weight is not one for one in unused))
    heads_dim = config.num_attention_heads * cache_geometry(model, BLOCK_SIZE).head_dim
    attention = 4 * config.num_hidden_layers * heads_dim * tokens * (tokens + 1) / 2
    return float(2 * weights * tokens + attention + 2 * unused[1].numel())
