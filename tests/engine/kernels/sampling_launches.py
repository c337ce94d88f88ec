"""The launches of sampling and copies for `test_sampling_compiles.py`; see `tests/support/triton_compile.py`."""

from functools import partial
from typing import Any

import numpy as np
import torch

from tests.support.triton_compile import report_launches
from twostroke.engine.interfaces import SequenceSlice
from twostroke.engine.kernels.copy_heads import copy_runs
from twostroke.engine.token_history import TokenHistory
from twostroke.engine.triton_sampling import TritonSampler
from twostroke.protocol.sampling import SamplingParams


class _Mask:
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def mask(self) -> Any:
        """All tokens may come."""
        return np.ones(self._vocabulary, np.bool_)


def launch_sampling(vocabulary: int, rows: int, dtype: torch.dtype) -> None:
    """A step that uses every kernel; what it returns was never computed."""
    params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias=((1, 2.0),))
    mask: Any = _Mask(vocabulary)
    part = SequenceSlice(0, [0], 0, [0], True, params, 0, (), TokenHistory([1, 2, 3], [4, 4]), mask)
    TritonSampler(torch.device("cpu"))(torch.empty(rows, vocabulary, dtype=dtype), [part] * rows)


def launch_copies(dtype: torch.dtype, head_dim: int) -> None:
    """Both ways."""
    cache = torch.empty((4, 8, 2, 2, 16, head_dim), dtype=dtype)
    blocks = torch.zeros(2, dtype=torch.int64)
    for gather in (True, False):
        copy_runs(cache, blocks, range(2, 4), cache[:2, :2].contiguous(), gather=gather)


if __name__ == "__main__":
    report_launches({
        "vocabulary 128256, 64 rows": partial(launch_sampling, 128_256, 64, torch.bfloat16),
        "vocabulary 100, 1 row": partial(launch_sampling, 100, 1, torch.float32),
        "copies of bfloat16, head_dim 128": partial(launch_copies, torch.bfloat16, 128),
    })  # fmt: skip
