"""Chooses the attention backend: by where the cache lies, and by nothing else."""

import torch

from twostroke.engine.attention.contract import AttentionBackend
from twostroke.engine.attention.cpu import CpuAttention
from twostroke.protocol.errors import ConfigError

_CPU_DTYPES = (torch.float32, torch.bfloat16)


def make_attention(cache: torch.Tensor, heads: int, threads: int) -> AttentionBackend:
    """Attention over `cache`. What its device has no attention for is refused, never computed in another way.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim], contiguous.
        heads: Query heads of the model.
        threads: CPU threads that may be used.

    Raises:
        ConfigError: There is no attention for this device, dtype or block size, or Triton is missing.
        ModelError: There is none for the model's heads.
    """
    match cache.device.type:
        case "cpu":
            if cache.dtype not in _CPU_DTYPES:
                raise ConfigError(f"model.dtype: {cache.dtype} is not served on CPU; set float32 or bfloat16")
            return CpuAttention(cache, heads, threads)
        case "cuda":
            return _make_triton_attention(cache, heads)
        case _:
            raise ConfigError(f"the KV cache lies on {cache.device}; attention is there for cpu and cuda")


def _make_triton_attention(cache: torch.Tensor, heads: int) -> AttentionBackend:
    try:
        from twostroke.engine.attention.gpu import TritonAttention  # noqa: PLC0415 - hosts without GPU have no Triton
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"attention on {cache.device} needs Triton ({error}); install twostroke[gpu], or set a CPU device"
        ) from error
    return TritonAttention(cache, heads)
