"""The sampler chooses what the plain reference chooses, for any mixture of fields, whatever else is in the batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference_sampling import reference_token
from tests.support.sampled_rows import EOS, Row, rows
from twostroke.engine.sampler import gumbel_max, sample
from twostroke.protocol.sampling import SamplingParams


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5))
def test_a_batch_gets_the_tokens_of_the_reference(batch: list[Row]) -> None:
    """Each row alone through plain Python, all rows together through the sampler."""
    tokens = sample(torch.tensor([row.logits for row in batch]), [row.slice() for row in batch], gumbel_max)
    expected = [reference_token(row.logits, row.params, row.prompt, row.output, EOS) for row in batch]
    assert [token.token_id for token in tokens] == expected


def test_bfloat16_logits_are_penalized_in_float32() -> None:
    """1.0078125 / 1.008 and 1 are one number in bfloat16: rounding would make the first token win the tie."""
    logits = [1.0078125, 1.0, *[-9.0] * 10]
    row = Row(logits, SamplingParams(temperature=0.0, repetition_penalty=1.008), [0], [])
    tokens = sample(torch.tensor([logits], dtype=torch.bfloat16), [row.slice()], gumbel_max)
    assert [token.token_id for token in tokens] == [1] == [reference_token(logits, row.params, [0], [], EOS)]
