"""TFLOP/s of attention of prompt chunks over a paged cache, as a share of a bfloat16 matrix product in the same run.

Operations are those of the pairs of tokens that attend to each other: what is computed beyond the diagonal is no
credit. Beside it runs torch's own attention over contiguous keys and values.
"""

import torch
from torch.nn import functional

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.paged import AttentionSizes, packed_batch, scattered_plan
from twostroke.engine.attention.contract import AttentionForm
from twostroke.engine.attention.gpu import TritonAttention

SIZES = AttentionSizes(heads=32, kv_heads=8, head_dim=128, layers=1, block_size=16, dtype=torch.bfloat16)
REHEARSED = AttentionSizes(heads=2, kv_heads=1, head_dim=32, layers=1, block_size=16, dtype=torch.float32)
CASES = {"8192 tokens": [(0, 8192)], "2048 after 6144": [(6144, 2048)], "8 x 1024": [(0, 1024)] * 8}
REHEARSED_CASES = {"40 tokens": [(0, 40)], "10 after 20": [(20, 10)]}
OURS, TORCH, PRODUCT = "twostroke", "torch attention, contiguous", "matrix product"
ROUNDS = 7


@torch.inference_mode()
def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    product = machine.matmul_tflops()
    findings.add("bf16 matrix product, 8192 cubed", "TFLOP/s", {PRODUCT: [product]})
    sizes = REHEARSED if machine.rehearses else SIZES
    for name, slices in (REHEARSED_CASES if machine.rehearses else CASES).items():
        rates = _ours(machine, sizes, slices)
        findings.add(f"prefill attention, {name}", "TFLOP/s", {OURS: rates})
        findings.add(f"prefill attention, {name}", "share of a matrix product", {OURS: [r / product for r in rates]})
        if all(start == 0 for start, _ in slices):
            findings.add(f"prefill attention, {name}", "TFLOP/s", {TORCH: _torch(machine, sizes, slices)})


def _flops(sizes: AttentionSizes, slices: list[tuple[int, int]]) -> float:
    pairs = sum(start * tokens + tokens * (tokens + 1) / 2 for start, tokens in slices)
    return 4 * sizes.heads * sizes.head_dim * pairs


def _ours(machine: Machine, sizes: AttentionSizes, slices: list[tuple[int, int]]) -> list[float]:
    """TFLOP/s with the write of the new keys and values, one a round."""
    device = machine.torch_device
    plan, blocks = scattered_plan(sizes, slices)
    query, key, value = sizes.inputs(plan.tokens, device)
    attention = TritonAttention(sizes.cache(blocks, device), sizes.heads)
    attend = attention.prepare(packed_batch(plan, sizes.block_size, device))
    form = AttentionForm(sizes.head_dim**-0.5)
    times = machine.times_s(lambda: attend(0, query, key, value, form), ROUNDS, 5)
    return [_flops(sizes, slices) / seconds / 1e12 for seconds in times]


def _torch(machine: Machine, sizes: AttentionSizes, slices: list[tuple[int, int]]) -> list[float]:
    """TFLOP/s of equal prompts in one batch."""
    shape = (len(slices), sizes.heads, slices[0][1], sizes.head_dim)
    query, key, value = (torch.empty(shape, dtype=sizes.dtype, device=machine.torch_device).normal_() for _ in range(3))
    times = machine.times_s(
        lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True), ROUNDS, 5
    )
    return [_flops(sizes, slices) / seconds / 1e12 for seconds in times]
