"""GB/s of decode attention over a paged cache, as a share of a copy within the device, measured in the same run.

A pass through all layers is captured as a graph, as decode steps are. Bytes are those of K and V that the tokens see;
a copy's are bytes read and bytes written.
"""

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.paged import AttentionSizes, packed_batch, scattered_plan
from twostroke.engine.attention.contract import AttentionForm
from twostroke.engine.attention.gpu import TritonAttention

SIZES = AttentionSizes(heads=32, kv_heads=8, head_dim=128, layers=4, block_size=16, dtype=torch.bfloat16)
REHEARSED = AttentionSizes(heads=2, kv_heads=1, head_dim=32, layers=2, block_size=16, dtype=torch.float32)
CASES = ((64, 2048), (16, 8192), (1, 32768), (256, 512))
"""(sequences, tokens that each sees)"""
REHEARSED_CASES = ((2, 40), (1, 300))
BLOCK_SIZES = (16, 64)
OURS = "twostroke"
COPY = "device copy"
ROUNDS = 7


@torch.inference_mode()
def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    copy = machine.copy_gb_per_s()
    findings.add("device copy, read and written", "GB/s", {COPY: [copy]})
    sizes = REHEARSED if machine.rehearses else SIZES
    for block_size in (sizes.block_size,) if machine.rehearses else BLOCK_SIZES:
        one = AttentionSizes(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.layers, block_size, sizes.dtype)
        for sequences, seen in REHEARSED_CASES if machine.rehearses else CASES:
            rates = _rates(machine, one, sequences, seen)
            case = f"decode attention, {sequences} x {seen} tokens, blocks of {block_size}"
            findings.add(case, "GB/s", {OURS: rates})
            findings.add(case, "share of a device copy", {OURS: [rate / copy for rate in rates]})


def _rates(machine: Machine, sizes: AttentionSizes, sequences: int, seen: int) -> list[float]:
    """GB/s, one a round."""
    device = machine.torch_device
    plan, blocks = scattered_plan(sizes, [(seen - 1, 1)] * sequences)
    cache = sizes.cache(blocks, device)
    query, key, value = sizes.inputs(sequences, device)
    batch = packed_batch(plan, sizes.block_size, device)
    attend = TritonAttention(cache, sizes.heads).prepare(batch)
    form = AttentionForm(sizes.head_dim**-0.5)

    def all_layers() -> torch.Tensor:
        outputs = [attend(layer, query, key, value, form) for layer in range(sizes.layers)]
        return outputs[-1]

    tables = (batch.slots, batch.blocks, batch.singles.first_block, batch.singles.lengths)
    graph = machine.capture(all_layers, [cache, query, key, value, *tables])
    moved = sizes.token_bytes() * sizes.layers * sequences * seen
    return [moved / seconds / 1e9 for seconds in machine.times_s(graph.replay, ROUNDS, 10)]
