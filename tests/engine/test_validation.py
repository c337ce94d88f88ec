"""Requests that an engine refuses, with the message and the field that the caller sees."""

from dataclasses import replace

import pytest

from tests.support.engine_requests import handed_over, make_request
from twostroke.engine.validation import RequestLimits, check_request
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.worker import Role

LIMITS = RequestLimits(Role.AGGREGATED, vocab_size=100, max_model_len=32, num_blocks=6, block_size=4)
CONTEXT = replace(LIMITS, role=Role.CONTEXT)
GENERATION = replace(LIMITS, role=Role.GENERATION)
PROMPT = range(10)


@pytest.mark.parametrize(
    ("request_", "limits", "max_tokens"),
    [
        (make_request(1, PROMPT, max_tokens=5), LIMITS, 5),
        (make_request(1, PROMPT), replace(LIMITS, num_blocks=99), 22),
        (make_request(1, PROMPT), LIMITS, 15),
        (make_request(1, PROMPT, max_tokens=15), LIMITS, 15),
        (make_request(1, PROMPT, max_tokens=22, phase=Phase.CONTEXT_ONLY), CONTEXT, 22),
        (make_request(1, PROMPT, phase=Phase.CONTEXT_ONLY), CONTEXT, 22),
        (handed_over(make_request(1, PROMPT, max_tokens=9), [5], blocks=3), GENERATION, 9),
        (make_request(1, PROMPT, generated=[1, 2], max_tokens=3), LIMITS, 3),
    ],
    ids=[
        "as asked",
        "by context length",
        "by cache",
        "fills cache",
        "context",
        "context, deduced",
        "hand-over",
        "resume",
    ],
)
def test_max_tokens_is_as_asked_or_deduced(request_: GenerationRequest, limits: RequestLimits, max_tokens: int) -> None:
    """The 24 cached positions of the small cache allow 25 tokens; a context worker needs room for the prompt only."""
    assert check_request(request_, limits) == max_tokens


REFUSED = [
    (
        make_request(1, range(30), max_tokens=3),
        LIMITS,
        "max_tokens",
        r"prompt \(30 tokens\) plus max_tokens \(3\) exceeds max_model_len \(32\)",
    ),
    (make_request(1, range(32)), replace(LIMITS, num_blocks=99), "prompt", r"prompt \(32 tokens\) leaves no room"),
    (make_request(1, range(25)), LIMITS, "prompt", r"prompt \(25 tokens\) leaves no room for output in 25 tokens"),
    (make_request(1, PROMPT, max_tokens=16), LIMITS, "prompt", "need 25 tokens of KV cache, which has 24"),
    (make_request(1, range(25), phase=Phase.CONTEXT_ONLY, max_tokens=1), CONTEXT, "prompt", "25 tokens of KV cache"),
    (make_request(1, PROMPT, min_tokens=16), LIMITS, "min_tokens", r"min_tokens \(16\) exceeds 25"),
    (make_request(1, [1, 100]), LIMITS, "prompt", r"prompt holds token id 100, outside 0\.\.99"),
    (make_request(1, [-1]), LIMITS, "prompt", "token id -1"),
    (make_request(1, [1], generated=[100]), LIMITS, "generated_ids", "token id 100"),
    (make_request(1, [1], stop_token_ids=(5, 100)), LIMITS, "stop_token_ids", "token id 100"),
    (make_request(1, [1], logit_bias=((100, 1.0),)), LIMITS, "logit_bias", "token id 100"),
    (make_request(1, [1], bad_words=((5,), (6, 100))), LIMITS, "bad_words", "token id 100"),
    (make_request(1, [1], generated=[2, 3], max_tokens=2), LIMITS, "generated_ids", "leave nothing to make"),
    (make_request(1, [1], phase=Phase.CONTEXT_ONLY), LIMITS, "phase", "aggregated worker does not run context_only"),
    (handed_over(make_request(1, [1]), [5], blocks=1), CONTEXT, "phase", "context worker does not run generation_only"),
    (
        handed_over(make_request(1, PROMPT), [5], blocks=2),
        GENERATION,
        "context_phase_params",
        "10 handed-over tokens fill 3 blocks, the handle has 2",
    ),
]


@pytest.mark.parametrize(("request_", "limits", "param", "message"), REFUSED, ids=[case[3][:30] for case in REFUSED])
def test_what_cannot_run_is_refused(
    request_: GenerationRequest, limits: RequestLimits, param: str, message: str
) -> None:
    """Never cut short; the message holds the values."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_request(request_, limits)
    assert caught.value.param == param


def test_a_handover_must_agree_with_its_request() -> None:
    """The first token must end `generated_ids`, and the prompt must have the length that the context phase saw."""
    good = handed_over(make_request(1, PROMPT), [5], blocks=3)
    other = handed_over(make_request(1, range(9)), [6], blocks=3)
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(InvalidRequestError, match="prompt has 10 tokens, context_phase_params say 9"):
        check_request(GenerationRequest(**fields | {"context_phase_params": other.context_phase_params}), GENERATION)
    with pytest.raises(InvalidRequestError, match=r"must end with the first tokens of context_phase_params, \[5\]"):
        check_request(GenerationRequest(**fields | {"generated_ids": other.generated_ids}), GENERATION)
