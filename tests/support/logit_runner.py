"""A fake runner whose tokens come of random logits through the real sampler, so that every sampling field counts."""

from collections.abc import Sequence

import numpy as np
import torch

from tests.support.fake_runner import ROOT_TAG, FakeRunner, next_tag
from tests.support.reference_sampling import reference_token
from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.engine.sampler import gumbel_max, sample
from twostroke.protocol.sampling import SamplingParams


def logits_of(tag: int, vocab_size: int) -> list[float]:
    """Logits that depend on the tokens so far only."""
    values: list[float] = np.random.default_rng(tag).normal(0.0, 2.0, vocab_size).astype(np.float32).tolist()
    return values


class LogitRunner(FakeRunner):
    """See the module."""

    def choose(self, part: SequenceSlice, tag: int) -> SampledToken:
        """Sample from the logits of `tag`."""
        logits = torch.tensor([logits_of(tag, self.vocab_size)])
        (token,) = sample(logits, [part], gumbel_max)
        return token


def reference_output(
    prompt: Sequence[int], count: int, params: SamplingParams, vocab_size: int, eos: Sequence[int]
) -> list[int]:
    """What a sequence must give: `count` output tokens, or fewer if one that ends it comes."""
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    tag = ROOT_TAG
    for position, token_id in enumerate(prompt):
        tag = next_tag(tag, token_id, position)
    output: list[int] = []
    while len(output) < count and not ending.intersection(output):
        output.append(reference_token(logits_of(tag, vocab_size), params, prompt, output, eos))
        tag = next_tag(tag, output[-1], len(prompt) + len(output) - 1)
    return output
