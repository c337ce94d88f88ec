"""The GPU's sampler gives what the CPU's gives: tokens for any mixture of fields, and the same logprobs."""

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernel_device import KERNEL_DEVICE
from tests.support.reference_sampling import reference_token
from tests.support.sampled_rows import EOS, Row, rows
from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.sampler import gumbel_max, sample
from twostroke.engine.token_history import TokenHistory
from twostroke.engine.triton_sampling import TritonSampler
from twostroke.protocol.sampling import SamplingParams

VOCAB = 1030


class Mask:
    """Stands for a `TokenConstraint`."""

    def __init__(self, allowed: npt.NDArray[np.bool_]) -> None:
        self._allowed = allowed

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come, [vocabulary]."""
        return self._allowed


@settings(max_examples=5, deadline=None)
@given(batch=st.lists(rows(), min_size=3, max_size=6))
def test_a_batch_gets_the_tokens_of_the_reference(batch: list[Row]) -> None:
    """Each row alone through plain Python, all rows together through the kernels."""
    logits = torch.tensor([row.logits for row in batch], device=KERNEL_DEVICE)
    tokens = TritonSampler(KERNEL_DEVICE)(logits, [row.slice() for row in batch])
    expected = [reference_token(row.logits, row.params, row.prompt, row.output, EOS) for row in batch]
    assert [token.token_id for token in tokens] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_gets_the_tokens_and_logprobs_of_the_cpu(dtype: torch.dtype) -> None:
    """Rows with ties and masks, long histories and many biases; in bfloat16 the logits themselves have many ties."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)
    slices = [_slice(drawn, row) for row in range(5)]
    expected = sample(logits.clone(), slices, gumbel_max)
    ours = TritonSampler(KERNEL_DEVICE)(logits.to(KERNEL_DEVICE), slices)
    assert [token.token_id for token in ours] == [token.token_id for token in expected]
    for token, other in zip(ours, expected, strict=True):
        _check_logprobs(token, other)


def test_no_rows_are_no_work() -> None:
    """A step that samples nothing."""
    assert TritonSampler(KERNEL_DEVICE)(torch.empty(0, VOCAB, device=KERNEL_DEVICE), []) == []


def test_logits_elsewhere_are_refused() -> None:
    """They are not moved silently."""
    with pytest.raises(ValueError, match="not on meta"):
        TritonSampler(KERNEL_DEVICE)(torch.empty(1, VOCAB, device="meta"), [_slice(random.Random(1), 0)])


def _slice(drawn: random.Random, row: int) -> SequenceSlice:
    """Any fields; the first two rows are greedy."""
    fields: dict[str, Any] = {
        "temperature": 0.0 if row < 2 else drawn.choice([0.4, 1.0, 1.3]),
        "seed": drawn.randrange(2**63),
        "top_k": drawn.choice([0, 30, 700]),
        "top_p": drawn.choice([1.0, 0.87312, 0.31219]),
        "min_p": drawn.choice([0.0, 0.0131]),
        "repetition_penalty": drawn.choice([1.0, 1.3, 0.7]),
        "presence_penalty": drawn.choice([0.0, 0.9]),
        "frequency_penalty": drawn.choice([0.0, -0.3]),
        "logit_bias": tuple((token, drawn.choice([-5.0, 2.5])) for token in drawn.sample(range(VOCAB), 40)),
        "logprobs": drawn.choice([None, 0, 3]),
    }
    params = SamplingParams(**fields)
    tokens = drawn.choices(range(VOCAB), k=400)
    mask: Any = Mask(np.array(drawn.choices([False, True], k=VOCAB))) if row % 2 else None
    return SequenceSlice(
        request_id=row,
        token_ids=[0],
        start=0,
        blocks=[0],
        sample=True,
        sampling=params,
        output_index=row * 17,
        forbidden_ids=tuple(sorted(drawn.sample(range(VOCAB), 5))),
        history=TokenHistory.wanted(params, tokens[:100], tokens[100:]) if params.penalized else None,
        constraint=mask,
    )


def _check_logprobs(token: SampledToken, other: SampledToken) -> None:
    assert (token.logprobs is None) == (other.logprobs is None)
    if token.logprobs is not None and other.logprobs is not None:
        assert token.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
        assert token.logprobs.top == pytest.approx(other.logprobs.top, abs=1e-4)
        assert len(token.logprobs.top_ids) == len(other.logprobs.top_ids)
