"""Do the kernels compute, on this GPU, what torch computes in float64?

Attention is set against the reference in float64 over the same cache; its error is given as a share of what the type's
rounding allows (the tests' bounds). What moves bytes must agree bit for bit, and sampled tokens must be equal.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.machine import Machine
from benchmarks.report import Better
from tests.support.attention_steps import LAYER, TOLERANCES, Heads, Step, make_step
from twostroke.engine.attention.contract import AttentionForm
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.attention.reference import ReferenceAttention
from twostroke.engine.head_copy import gather_heads, scatter_heads
from twostroke.engine.interfaces import SequenceSlice
from twostroke.engine.packing import pack
from twostroke.engine.sampler import gumbel_max, sample
from twostroke.engine.token_history import TokenHistory
from twostroke.engine.triton_sampling import TritonSampler
from twostroke.protocol.sampling import SamplingParams

OURS, ALLOWED, WRONG, ROWS = "kernel", "allowed", "wrong", "checked"
FORMS = {
    "plain": AttentionForm(0.1),
    "window": AttentionForm(0.1, window=37),
    "soft cap": AttentionForm(0.1, softcap=5.0),
}
MIXED = [(0, 1), (699, 1), (63, 1), (64, 3), (15, 1), (0, 130), (250, 70), (17, 33)]
"""(start, tokens): decodes at block edges and over several splits, a short slice, chunks with and without a prefix."""
REHEARSED = [(20, 1), (8, 1), (0, 20), (5, 12)]
SHAPES = ((8, 4, 128, 16), (2, 1, 64, 16), (1, 32, 64, 128), (2, 3, 80, 32), (2, 7, 96, 8), (2, 2, 256, 64))
"""KV heads, query heads of each, elements of a head, tokens of a block. Each form takes seconds to compile."""
SAMPLED_ROWS = 64


@torch.inference_mode()
def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    _check_head_copies(machine, findings)
    _check_sampling(machine, findings)
    for heads, name, form in _cases(machine):
        _check_attention(machine, findings, heads, name, form)


def _cases(machine: Machine) -> Iterator[tuple[Heads, str, AttentionForm]]:
    if machine.rehearses:
        yield Heads(1, 2, 32, 8, torch.float32), "soft cap", FORMS["soft cap"]
        return
    for kv_heads, group, head_dim, block_size in SHAPES:
        yield Heads(kv_heads, group, head_dim, block_size, torch.bfloat16), "plain", FORMS["plain"]
    usual = SHAPES[0]
    for dtype in (torch.float32, torch.float16):
        yield Heads(*usual, dtype), "plain", FORMS["plain"]
    for name in ("window", "soft cap"):
        yield Heads(*usual, torch.bfloat16), name, FORMS[name]


def _check_attention(machine: Machine, findings: Findings, heads: Heads, name: str, form: AttentionForm) -> None:
    """One mixed step: the write of keys and values, decodes, chunks."""
    step = _on(make_step(heads, REHEARSED if machine.rehearses else MIXED, form, seed=3), machine.torch_device)
    output = step.run(TritonAttention(step.cache, heads.heads))
    expected_cache = step.before.clone()
    attend = ReferenceAttention(expected_cache).prepare(pack(step.plan, heads.block_size).attention)
    expected = attend(LAYER, step.query.double(), step.key.double(), step.value.double(), form)
    error = ((output.double() - expected).abs() / (1 + expected.abs())).nan_to_num(float("inf")).max()
    dtype = str(heads.dtype).removeprefix("torch.")
    case = f"attention, {name}, {heads.kv_heads} x {heads.group} heads of {heads.head_dim}, {dtype}"
    findings.add(case, "relative error", {OURS: [float(error)], ALLOWED: [TOLERANCES[heads.dtype]]})
    findings.compare(case, OURS, ALLOWED, better=Better.LOWER, limit=1.0, aim=1.0)
    wrong = (step.cache.double().nan_to_num() != expected_cache.nan_to_num()).sum()
    _agree(findings, f"cache after the write, {heads.head_dim}, {dtype}, {name}", int(wrong), step.cache.numel())


def _check_head_copies(machine: Machine, findings: Findings) -> None:
    """Some heads of scattered blocks, out and back in."""
    device = machine.torch_device
    cache = torch.randn(12, 4, 2, 2, 8, 32, device=device)
    blocks, heads = [7, 2, 11, 0, 5], range(1, 3)
    buffer = torch.empty(len(blocks), len(heads), *cache.shape[2:], device=device)
    gather_heads(cache, blocks, heads, buffer)
    wrong = int((buffer != cache[blocks, 1:3]).sum())
    copied = torch.zeros_like(cache)
    scatter_heads(copied, blocks, heads, buffer)
    expected = torch.zeros_like(cache)
    expected[blocks, 1:3] = cache[blocks, 1:3]
    wrong += int((copied != expected).sum())
    _agree(findings, "gather and scatter of heads", wrong, 2 * buffer.numel())


def _check_sampling(machine: Machine, findings: Findings) -> None:
    """The tokens of the reference, for rows of every kind, from logits of a large vocabulary."""
    rows, vocabulary = (4, 1030) if machine.rehearses else (SAMPLED_ROWS, 128256)
    drawn = random.Random(11)
    slices = [_row(drawn, row, vocabulary) for row in range(rows)]
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4)).mul_(3)
    expected = sample(logits.clone(), slices, gumbel_max)
    ours = TritonSampler(machine.torch_device)(logits.to(machine.torch_device), slices)
    wrong = sum(one.token_id != other.token_id for one, other in zip(ours, expected, strict=True))
    _agree(findings, "sampled tokens", wrong, rows)


def _row(drawn: random.Random, row: int, vocabulary: int) -> SequenceSlice:
    """A row with filters, penalties and biases; every fourth is greedy."""
    params = SamplingParams(
        temperature=0.0 if row % 4 == 0 else drawn.choice([0.4, 1.0, 1.3]),
        seed=drawn.randrange(2**63),
        top_k=drawn.choice([0, 30, 700]),
        top_p=drawn.choice([1.0, 0.87312, 0.31219]),
        min_p=drawn.choice([0.0, 0.0131]),
        repetition_penalty=drawn.choice([1.0, 1.3]),
        frequency_penalty=drawn.choice([0.0, -0.3]),
        logit_bias=tuple((token, drawn.choice([-5.0, 2.5])) for token in drawn.sample(range(vocabulary), 20)),
        logprobs=3,
    )
    tokens = drawn.choices(range(vocabulary), k=300)
    history = TokenHistory.wanted(params, tokens[:100], tokens[100:]) if params.penalized else None
    return SequenceSlice(row, [0], 0, [0], True, params, row * 17, history=history)


def _agree(findings: Findings, case: str, wrong: int, of: int) -> None:
    """Note how many of the results differ; the ratio must be 0."""
    findings.add(case, "results", {WRONG: [float(wrong)], ROWS: [float(of)]})
    findings.compare(case, WRONG, ROWS, better=Better.LOWER, limit=0.0, aim=0.0)


def _on(step: Step, device: torch.device) -> Step:
    """The step with its tensors on `device`."""
    moved = {name: getattr(step, name).to(device) for name in ("cache", "before", "query", "key", "value")}
    return replace(step, **moved)
