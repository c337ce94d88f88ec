"""Random engine steps for tests of attention: caches that are NaN where nothing was written, and an exact answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostroke.engine.attention.contract import AttentionBackend, AttentionForm
from twostroke.engine.attention.reference import ReferenceAttention, write_kv
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.packing import pack
from twostroke.protocol.sampling import SamplingParams

LAYERS = 2
LAYER = 1
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative, and absolute below 1: the result is rounded, and so are the weights before they meet the values."""


@dataclass(frozen=True)
class Heads:
    """Sizes of a model's attention and its cache."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Step:
    """One step as it is given to a backend: `cache` holds the prefixes, the rest is new.

    Attributes:
        plan: Slices on blocks that are scattered over the cache.
        cache: [block, kv_head, layer, 2, token, head_dim].
        before: A float64 copy of it.
        query: [tokens, heads, head_dim], not contiguous, as the model library gives it.
        key: [tokens, kv_heads, head_dim], likewise.
        value: As `key`.
        form: How the layer attends.
    """

    plan: StepPlan
    cache: torch.Tensor
    before: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    form: AttentionForm

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The output of `backend`, which was made over `cache`."""
        attend = backend.prepare(pack(self.plan, self.cache.shape[4]).attention)
        return attend(LAYER, self.query, self.key, self.value, self.form)

    def check(self, output: torch.Tensor) -> None:
        """That `output` is the reference's, and what is now in the cache too, bit for bit."""
        expected_cache = self.before.clone()
        attend = ReferenceAttention(expected_cache).prepare(pack(self.plan, self.cache.shape[4]).attention)
        expected = attend(LAYER, self.query.double(), self.key.double(), self.value.double(), self.form)
        tolerance = TOLERANCES[output.dtype]
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(self.cache.double().nan_to_num(), expected_cache.nan_to_num())


def make_step(shape: Heads, lengths: Sequence[tuple[int, int]], form: AttentionForm, seed: int) -> Step:
    """A step of slices of (start, tokens)."""
    blocks = sum(-(-(start + tokens) // shape.block_size) for start, tokens in lengths)
    free = random.Random(seed).sample(range(blocks + 3), blocks)
    parts = []
    for request_id, (start, tokens) in enumerate(lengths):
        table = [free.pop() for _ in range(-(-(start + tokens) // shape.block_size))]
        parts.append(SequenceSlice(request_id, [0] * tokens, start, table, True, SamplingParams(), 0))
    plan = StepPlan(parts)
    draw = torch.Generator().manual_seed(seed)
    size = (blocks + 3, shape.kv_heads, LAYERS, 2, shape.block_size, shape.head_dim)
    cache = torch.full(size, float("nan"), dtype=shape.dtype)
    for part in parts:
        slots = [
            part.blocks[at // shape.block_size] * shape.block_size + at % shape.block_size for at in range(part.start)
        ]
        keys, values = torch.randn((2, part.start, shape.kv_heads, shape.head_dim), generator=draw).to(shape.dtype)
        write_kv(cache, LAYER, keys, values, torch.tensor(slots, dtype=torch.int64))
    query, key, value = (
        torch.randn((heads, plan.tokens, shape.head_dim), generator=draw).to(shape.dtype).transpose(0, 1)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return Step(plan, cache, cache.double(), query, key, value, form)
