"""Launches of attention kernels, for `test_attention_compiles.py`; see `tests/support/triton_compile.py`.

`python -m tests.engine.kernels.attention_launches all` takes every pair of head size and dtype, otherwise a few.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tests.support.triton_compile import report_launches
from twostroke.engine.attention.contract import AttentionForm, ChunkSpan, SingleTokens
from twostroke.engine.attention.gpu import DTYPES, HEAD_DIMS
from twostroke.engine.kernels.decode_attention import attend_singles
from twostroke.engine.kernels.prefill_attention import attend_chunks, choose_tile_form, cut_into_tiles
from twostroke.engine.kernels.write_kv import write_kv

KV_HEADS = 2
TOKENS = 100
CONTEXT = 1000
PLAIN = AttentionForm(0.1)


@dataclass(frozen=True)
class Step:
    """What the tensors of a step look like; their content is not looked at."""

    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int = 16
    form: AttentionForm = PLAIN

    @property
    def cache(self) -> torch.Tensor:
        """A small one."""
        return torch.empty((4, KV_HEADS, 2, 2, self.block_size, self.head_dim), dtype=self.dtype)

    def heads(self, count: int) -> torch.Tensor:
        """Query, key or value, in the layout in which the model library gives them."""
        return torch.empty((count, TOKENS, self.head_dim), dtype=self.dtype).transpose(0, 1)

    @property
    def output(self) -> torch.Tensor:
        """Where the result goes."""
        return torch.empty((TOKENS, KV_HEADS * self.group, self.head_dim), dtype=self.dtype)


def write(step: Step) -> None:
    """Write K and V."""
    key = step.heads(KV_HEADS)
    write_kv(step.cache, 1, key, key, torch.zeros(TOKENS, dtype=torch.int64))


def decode(step: Step) -> None:
    """Attend to `CONTEXT` tokens: in several splits, but in one where the form's window is short."""
    table = torch.zeros(TOKENS, dtype=torch.int64)
    query = step.heads(KV_HEADS * step.group)
    attend_singles(step.output, query, step.cache, 1, table, SingleTokens(table, table), CONTEXT, step.form)


def prefill(step: Step) -> None:
    """Attend as one chunk."""
    table = torch.zeros(TOKENS, dtype=torch.int64)
    tiles = cut_into_tiles([ChunkSpan(0, TOKENS, 0, 0)], choose_tile_form(step.head_dim, step.dtype).rows // step.group)
    attend_chunks(step.output, step.heads(KV_HEADS * step.group), step.cache, 1, table, tiles, step.form)


def few() -> dict[str, Callable[[], None]]:
    """Each kernel in the forms that differ most."""
    usual = Step(torch.bfloat16, 128, 4)
    padded = Step(torch.float16, 80, 3, 8, AttentionForm(0.1, window=64, softcap=30.0))
    exact = Step(torch.float32, 64, 1)
    launches: dict[str, Callable[[], None]] = {
        "write, bfloat16": partial(write, usual),
        "write, float32": partial(write, exact),
    }
    for label, step in (("usual", usual), ("padded", padded), ("exact", exact)):
        launches[f"decode, {label}"] = partial(decode, step)
        launches[f"prefill, {label}"] = partial(prefill, step)
    launches["prefill, wide"] = partial(prefill, Step(torch.bfloat16, 256, 2, 128))
    return launches


def every() -> dict[str, Callable[[], None]]:
    """Each kernel with every dtype and head size, capped too."""
    launches: dict[str, Callable[[], None]] = {}
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            step = Step(dtype, head_dim, 5, 32, AttentionForm(0.1, softcap=30.0))
            label = f"{dtype}, head_dim {head_dim}"
            launches[f"write, {label}"] = partial(write, step)
            launches[f"decode, {label}"] = partial(decode, step)
            launches[f"prefill, {label}"] = partial(prefill, step)
    return launches


if __name__ == "__main__":
    report_launches(every() if sys.argv[1:] == ["all"] else few())
