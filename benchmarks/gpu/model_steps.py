"""Decode step time and prefill of a random-weight Llama, against what the GPU's memory and matrix units allow.

    decode    (bytes of weights + bytes of KV that the step sees) / copy bandwidth, over the time of a step
    prefill   operations of 8192 tokens over time, as a share of the data sheet's rate (MFU) and of a matrix product

A decode step is timed twice: as a user gets it (pack, replay, sample, token ids on the host), and as replays of the
captured graph one after another, which is the device's part.
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.llama import BLOCK_SIZE, make_cache, make_llama, make_runner, step_flops, weight_bytes
from benchmarks.gpu.machine import Machine
from benchmarks.report import Better
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.decode_graphs import DecodeGraphs
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.engine.kv_cache import KVCache
from twostroke.engine.library_attention import forward
from twostroke.engine.model_loader import LoadedModel
from twostroke.engine.packing import pack
from twostroke.protocol.sampling import SamplingParams

WHOLE, REPLAYS, FLOOR = "whole step", "replays", "bytes over copy bandwidth"
PREFILL, PEAK, PRODUCT = "prefill", "data sheet", "matrix product"
BATCHES = {1: 2048, 64: 2048}
"""By number of sequences, the tokens that each sees."""
REHEARSED_BATCHES = {1: 20, 3: 20}
PROMPT = 8192
ROUNDS = 15
_ROOM = 256
"""Positions after the prompt that the model is captured for: the graph's grid covers its longest sequence."""


def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    copy, product = machine.copy_gb_per_s(), machine.matmul_tflops()
    findings.add("device copy, read and written", "GB/s", {"device copy": [copy]})
    batches = REHEARSED_BATCHES if machine.rehearses else BATCHES
    prompt = 40 if machine.rehearses else PROMPT
    model = make_llama(machine, prompt + _ROOM)
    findings.note(f"{type(model.module).__name__} of {weight_bytes(model) / 1e9:.2f} GB read a step, {model.dtype}")
    blocks = max(_blocks(prompt), *(count * _blocks(seen) for count, seen in batches.items()))
    bench = Bench(machine, findings, model, make_cache(machine, model, blocks * BLOCK_SIZE))
    measure_prefill(bench, prompt, product)
    for count, seen in batches.items():
        measure_decode(bench, count, seen, copy)


@dataclass(frozen=True, slots=True)
class Bench:
    """What both measurements use."""

    machine: Machine
    findings: Findings
    model: LoadedModel
    cache: KVCache


def measure_prefill(bench: Bench, prompt: int, product: float) -> None:
    """One prompt as one step; `product` is the TFLOP/s of a matrix product."""
    machine, findings, model, cache = bench.machine, bench.findings, bench.model, bench.cache
    runner = make_runner(machine, model, cache)
    plan = StepPlan([_slice(0, prompt, 0, range(_blocks(prompt)), model)])
    times = machine.wall_s(lambda: runner.run(plan), 7)
    rates = [step_flops(model, prompt) / seconds / 1e12 for seconds in times]
    case = f"prefill of {prompt} tokens"
    findings.add(case, "s", {PREFILL: times})
    peak = machine.peak_tflops()
    if peak is None:
        findings.note("the data sheet's rate of this GPU is not listed in machine.py: prefill has a share but no MFU")
    others = {PRODUCT: [product] * len(rates), **({PEAK: [peak] * len(rates)} if peak else {})}
    findings.add(case, "TFLOP/s", {PREFILL: rates, **others})
    findings.add(case, "share of a matrix product", {PREFILL: [rate / product for rate in rates]})
    if peak:
        # `Report.of` finds the first measurement of a case: the rates need a case of their own
        findings.add(f"MFU, {case}", "TFLOP/s", {PREFILL: rates, PEAK: others[PEAK]})
        findings.compare(f"MFU, {case}", PREFILL, PEAK, better=Better.HIGHER, limit=0.5, aim=0.6)


def measure_decode(bench: Bench, count: int, seen: int, copy: float) -> None:
    """`count` sequences, each with its `seen`th token; `copy` is the GB/s of a device copy."""
    machine, findings, model, cache = bench.machine, bench.findings, bench.model, bench.cache
    blocks = _blocks(seen)
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(count)]
    plan = StepPlan([_slice(row, 1, seen - 1, table, model) for row, table in enumerate(tables)])
    floor_s = (weight_bytes(model) + count * seen * cache.geometry.block_bytes / BLOCK_SIZE) / copy / 1e9
    runner = make_runner(machine, model, cache)
    runner.capture(machine.open_device(), count)
    whole = machine.wall_s(lambda: runner.run(plan), ROUNDS)
    replays = _replay_times(machine, model, cache, plan)
    case = f"decode step, {count} x {seen} tokens"
    for name, times in ((WHOLE, whole), (REPLAYS, replays)):
        findings.add(f"{case}, {name}", "ms", {FLOOR: [floor_s * 1e3] * len(times), name: [t * 1e3 for t in times]})
        findings.compare(f"{case}, {name}", FLOOR, name, better=Better.HIGHER, limit=0.7, aim=0.8)
    findings.add(f"{case}, {WHOLE}", "tokens/s", {WHOLE: [count / statistics.median(whole)]})


@torch.inference_mode()
def _replay_times(machine: Machine, model: LoadedModel, cache: KVCache, plan: StepPlan) -> list[float]:
    """Seconds of device time of a replay, its numbers' upload included."""
    module = model.module
    graphs = DecodeGraphs(
        machine.open_device(),
        partial(forward, module),
        TritonAttention(cache.tensor, model.config.num_attention_heads),
        [*module.parameters(), *module.buffers(), cache.tensor],
        len(plan.slices),
        model.max_model_len,
        BLOCK_SIZE,
    )
    step = pack(plan, BLOCK_SIZE)
    return machine.times_s(lambda: graphs.run(step), ROUNDS, 5)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _slice(row: int, tokens: int, start: int, table: range, model: LoadedModel) -> SequenceSlice:
    """Greedy, over blocks in a row."""
    ids = [(7 + 31 * at + 17 * row) % model.config.vocab_size for at in range(tokens)]
    return SequenceSlice(row, ids, start, list(table), True, SamplingParams(temperature=0.0), 0)
