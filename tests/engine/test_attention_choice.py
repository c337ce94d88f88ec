"""Which attention serves a cache, and what is refused instead of served in another way."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from twostroke.engine.attention.choice import make_attention
from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, SingleTokens
from twostroke.engine.attention.cpu import CpuAttention
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.protocol.errors import ConfigError, ModelError


def cache(
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = 2,
    block_size: int = 16,
    head_dim: int = 64,
) -> torch.Tensor:
    """A cache without memory, on a device that need not be there."""
    with FakeTensorMode():
        return torch.empty((4, kv_heads, 1, 2, block_size, head_dim), dtype=dtype, device=device)


def test_the_device_of_the_cache_decides() -> None:
    """Not whether a GPU, Triton or its interpreter is there."""
    assert isinstance(make_attention(torch.zeros(4, 2, 1, 2, 16, 24), 4, 1), CpuAttention)
    assert isinstance(make_attention(cache(), 4, 1), TritonAttention)


@pytest.mark.parametrize(
    ("wrong", "heads", "error", "message"),
    [
        (cache("meta"), 4, ConfigError, "lies on meta"),
        (cache("cpu", torch.float16), 4, ConfigError, "torch.float16 is not served on CPU"),
        (cache(dtype=torch.float64), 4, ConfigError, "torch.float64 has no GPU attention"),
        (cache(block_size=4), 4, ConfigError, "block_size: 4 has no GPU attention; set 8 to 128"),
        (cache(block_size=129), 4, ConfigError, "block_size: 129"),
        (cache(head_dim=72), 4, ModelError, "heads of 72 elements"),
        (cache(), 5, ModelError, "5 query heads over 2 KV heads"),
        (cache(kv_heads=1), 33, ModelError, "33 query heads over 1 KV heads"),
        (cache().transpose(0, 1), 4, ConfigError, "needs it contiguous"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_value(
    wrong: torch.Tensor, heads: int, error: type[Exception], message: str
) -> None:
    """At the start, not at the first request."""
    with pytest.raises(error, match=message):
        make_attention(wrong, heads, 1)


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.delitem(sys.modules, "twostroke.engine.attention.gpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"install twostroke\[gpu\]"):
        make_attention(cache(), 4, 1)


def test_triton_attention_takes_no_cpu_memory_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels would read addresses that mean nothing to the GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="lies on cpu"):
        TritonAttention(cache("cpu"), 4)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(1, 4, 64, dtype=torch.float16), "query is torch.float16 on cpu, the KV cache torch.float32"),
        (torch.zeros(1, 4, 64, device="meta"), "query is torch.float32 on meta"),
        (torch.zeros(2, 4, 64), r"shape \(2, 4, 64\)"),
        (torch.zeros(1, 64, 4).transpose(1, 2), "contiguous elements"),
    ],
)
def test_a_layer_whose_tensors_do_not_fit_is_refused(query: torch.Tensor, message: str) -> None:
    """Kernels check no bounds and convert nothing."""
    attention = TritonAttention(torch.zeros(4, 2, 1, 2, 16, 64), 4)
    one = torch.tensor([1])
    step = attention.prepare(AttentionBatch(one, one, SingleTokens(one - 1, one), []))
    key = torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match=message):
        step(0, query, key, key, AttentionForm(0.1))
