"""The CPU attention path against the reference, over random steps."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.engine.attention.contract import AttentionForm
from twostroke.engine.attention.cpu import CpuAttention
from twostroke.engine.attention.reference import ReferenceAttention, write_kv
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.packing import pack
from twostroke.protocol.sampling import SamplingParams

LAYERS = 2
BLOCKS = 64


@dataclass(frozen=True)
class Shape:
    """One compiled geometry; few of them, since each is compiled."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


SHAPES = [
    Shape(kv_heads=2, group=1, head_dim=24, block_size=5, dtype=torch.float32),
    Shape(kv_heads=1, group=4, head_dim=16, block_size=4, dtype=torch.float32),
    Shape(kv_heads=3, group=3, head_dim=40, block_size=16, dtype=torch.bfloat16),
]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def backends(request: pytest.FixtureRequest) -> tuple[Shape, CpuAttention, ReferenceAttention]:
    """Both backends, each with a cache of its own; memory that no token was written to is NaN."""
    shape: Shape = request.param
    size = (BLOCKS, shape.kv_heads, LAYERS, 2, shape.block_size, shape.head_dim)
    caches = [torch.full(size, float("nan"), dtype=shape.dtype) for _ in range(2)]
    return shape, CpuAttention(caches[0], shape.kv_heads * shape.group, threads=1), ReferenceAttention(caches[1])


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 30),
    softcap=st.none() | st.just(3.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_agree_with_the_reference(
    backends: tuple[Shape, CpuAttention, ReferenceAttention],
    lengths: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """Decodes and chunks over cached prefixes, with grouped heads, windows and soft caps, in one step."""
    shape, cpu, reference = backends
    random = torch.Generator().manual_seed(seed)
    plan = _plan(lengths, shape.block_size, random)
    form = AttentionForm(shape.head_dim**-0.5, window, softcap)
    outputs = []
    for backend, cache in ((cpu, cpu.cache), (reference, reference._cache)):
        random.manual_seed(seed + 1)
        cache.fill_(float("nan"))
        for part in plan.slices:
            before = _tensor((part.start, shape.kv_heads, 2, shape.head_dim), shape.dtype, random)
            slots = _slots(part, range(part.start), shape.block_size)
            write_kv(cache, 1, before[:, :, 0], before[:, :, 1], slots)
        query = _tensor((plan.tokens, shape.kv_heads * shape.group, shape.head_dim), shape.dtype, random)
        key, value = _tensor((2, plan.tokens, shape.kv_heads, shape.head_dim), shape.dtype, random)
        outputs.append(backend.prepare(pack(plan, shape.block_size).attention)(1, query, key, value, form))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=TOLERANCES[shape.dtype])
    assert torch.equal(cpu.cache.nan_to_num(), reference._cache.nan_to_num())


def test_threads_share_a_step_without_changing_it() -> None:
    """The same decodes give the same bits with one thread and with three."""
    shape = SHAPES[1]
    random = torch.Generator().manual_seed(3)
    cache = _tensor((BLOCKS, shape.kv_heads, LAYERS, 2, shape.block_size, shape.head_dim), shape.dtype, random)
    plan = _plan([(9, 1), (30, 1), (1, 1), (16, 1), (3, 1)], shape.block_size, random)
    query = _tensor((5, shape.kv_heads * shape.group, shape.head_dim), shape.dtype, random)
    key, value = _tensor((2, 5, shape.kv_heads, shape.head_dim), shape.dtype, random)
    outputs = [
        CpuAttention(cache, shape.kv_heads * shape.group, threads).prepare(pack(plan, shape.block_size).attention)(
            0, query, key, value, AttentionForm(0.3)
        )
        for threads in (1, 3)
    ]
    assert torch.equal(outputs[0], outputs[1])


def _plan(lengths: list[tuple[int, int]], block_size: int, random: torch.Generator) -> StepPlan:
    """Slices of (start, tokens) on blocks scattered over the cache."""
    free = torch.randperm(BLOCKS, generator=random).tolist()
    parts = []
    for request_id, (start, tokens) in enumerate(lengths):
        blocks = [free.pop() for _ in range(-(-(start + tokens) // block_size))]
        parts.append(SequenceSlice(request_id, [0] * tokens, start, blocks, True, SamplingParams(), 0))
    return StepPlan(parts)


def _slots(part: SequenceSlice, positions: range, block_size: int) -> torch.Tensor:
    return torch.tensor(
        [part.blocks[at // block_size] * block_size + at % block_size for at in positions], dtype=torch.int64
    )


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(dtype)
