"""Rows of logits for tests of samplers: any mixture of sampling fields, after any tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from twostroke.engine.finish import FinishRules
from twostroke.engine.interfaces import SequenceSlice
from twostroke.engine.sequence import Sequence
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens

VOCAB = 12
EOS = (3,)
TOKEN = st.integers(0, VOCAB - 1)
# Odd fractions: sums of probabilities that meet them exactly, where rounding would decide, do not come up.
FRACTION = st.sampled_from([0.0137, 0.1213, 0.3271, 0.6119, 0.9173])


@dataclass(frozen=True)
class Row:
    """What one token is chosen from."""

    logits: list[float]
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    def slice(self) -> SequenceSlice:
        """The slice that a scheduler makes of a sequence with these tokens, some of them received with the request."""
        request = GenerationRequest(
            key=SequenceKey(1),
            prompt_ids=pack_tokens(self.prompt),
            generated_ids=pack_tokens(self.output[:2]),
            sampling=self.params,
        )
        sequence = Sequence(1, request, FinishRules(self.params, EOS, 100, 100), "model")
        for token_id in self.output[2:]:
            sequence.append(token_id)
        return SequenceSlice(
            request_id=1,
            token_ids=sequence.token_ids[-1:],
            start=len(sequence.token_ids) - 1,
            blocks=[0],
            sample=True,
            sampling=self.params,
            output_index=sequence.output_tokens,
            forbidden_ids=sequence.forbidden_ids(),
            history=sequence.history,
        )


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    """Any fields, each often left alone."""
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 1.9])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "min_p": draw(st.just(0.0) | FRACTION),
        "top_p": draw(st.just(1.0) | FRACTION),
        "top_k": draw(st.integers(0, VOCAB + 2)),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.7, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, -1.5, 0.8])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, -0.4, 1.1])),
        "logit_bias": tuple(
            draw(st.dictionaries(TOKEN, st.sampled_from([-100.0, -2.5, 1.5, 100.0]), max_size=3)).items()
        ),
        "bad_words": tuple(map(tuple, draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=3)))),
        "stop_token_ids": tuple(draw(st.lists(TOKEN, max_size=2))),
        "ignore_eos": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 6)),
    }
    return SamplingParams(**fields)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Logits without ties, and how to choose from them after which tokens."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits: list[float] = random.normal(0.0, 2.0, VOCAB).astype(np.float32).tolist()
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=6))
    return Row(logits, draw(sampling()), prompt, draw(st.lists(TOKEN, max_size=6)))
