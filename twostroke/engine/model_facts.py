"""What the engine must know of a loaded model, and the sizes of its KV cache; the runners of all devices share it."""

from twostroke.engine.interfaces import ModelFacts
from twostroke.engine.kv_cache import CacheGeometry
from twostroke.engine.model_loader import LoadedModel, ModelPlan
from twostroke.protocol.transfer import LayoutFingerprint


def cache_geometry(model: LoadedModel | ModelPlan, block_size: int) -> CacheGeometry:
    """Sizes of one block of `model`'s KV cache."""
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return CacheGeometry(kv_heads, config.num_hidden_layers, block_size, head_dim, model.dtype)


def model_facts(model: LoadedModel, geometry: CacheGeometry) -> ModelFacts:
    """What the engine must know of `model`, whose cache has blocks of these sizes."""
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
