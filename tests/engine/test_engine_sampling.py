"""Sampling goes on exactly, whatever happens to a sequence: chunks, company, preemption, resume, hand-over."""

import random
from collections.abc import Sequence

import pytest

from tests.support.engine_requests import (
    SamplingFields,
    engine_config,
    handed_over,
    make_request,
    run_until_idle,
    tokens_of,
)
from tests.support.logit_runner import LogitRunner, reference_output
from twostroke.engine.engine import Engine
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import Role

VOCAB, EOS, MAX_TOKENS = 24, (0,), 14
FIELDS: dict[str, SamplingFields] = {
    "greedy": {"temperature": 0.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6},
    "presence": {"temperature": 0.0, "presence_penalty": 1.7},
    "frequency": {"seed": 5, "frequency_penalty": 0.9},
    "bias": {"temperature": 0.0, "logit_bias": ((3, 2.5), (4, -100.0))},
    "bad words": {"temperature": 0.0, "bad_words": ((7,), (5, 6), (2, 2, 9))},
    "min_p": {"seed": 9, "min_p": 0.2},
    "filters": {"seed": 9, "top_k": 9, "top_p": 0.8, "temperature": 1.5},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (4, 8, 15)},
    "all": {
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "min_p": 0.05,
        "logit_bias": ((0, 3.0),),
        "bad_words": ((1, 2), (3,)),
        "min_tokens": 5,
    },
}


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 23 tokens, some with a common start."""
    print("seed 4")
    draw = random.Random(4)
    common = [draw.randrange(1, VOCAB) for _ in range(9)]
    return [
        common[: draw.randint(0, 9)] + [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 14))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("max_batched_tokens", [3, 64], ids=lambda budget: f"budget {budget}")
@pytest.mark.parametrize("num_blocks", [10, 200], ids=["preempting", "ample"])
def test_tokens_are_those_of_the_reference_whatever_the_schedule(max_batched_tokens: int, num_blocks: int) -> None:
    """All fields in one batch, two prompts each, next to others; preempted sequences count their tokens only once."""
    runner = LogitRunner(num_blocks, vocab_size=VOCAB, eos_token_ids=EOS)
    engine = Engine(runner, engine_config(max_batched_tokens=max_batched_tokens), Role.AGGREGATED)
    cases = list(zip(list(FIELDS.values()) * 2, prompts(2 * len(FIELDS)), strict=True))
    for client_id, (fields, prompt) in enumerate(cases):
        engine.add(_request(client_id, prompt, fields))
    outputs = run_until_idle(engine)
    for client_id, (fields, prompt) in enumerate(cases):
        assert tokens_of(outputs[client_id]) == _expected(prompt, fields), fields
    assert (engine.load().counters.preemptions > 0) == (num_blocks == 10)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_resumed_request_goes_on_as_if_it_had_never_moved(fields: SamplingFields) -> None:
    """From every point of the output: what was generated counts as output, not as prompt."""
    (prompt,) = prompts(1)
    whole = _expected(prompt, fields)
    for received in range(len(whole)):
        engine = Engine(LogitRunner(vocab_size=VOCAB, eos_token_ids=EOS), engine_config(), Role.AGGREGATED)
        engine.add(_request(1, prompt, fields, generated=whole[:received]))
        assert tokens_of(run_until_idle(engine)[1], offset=received) == whole[received:]


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_hand_over_changes_no_token(fields: SamplingFields) -> None:
    """First token on a context engine, the others on a generation engine."""
    prompt = prompts(2)[1]
    context = Engine(LogitRunner(vocab_size=VOCAB, eos_token_ids=EOS), engine_config(), Role.CONTEXT)
    runner = LogitRunner(vocab_size=VOCAB, eos_token_ids=EOS)
    generation = Engine(runner, engine_config(), Role.GENERATION)
    request = _request(1, prompt, fields, phase=Phase.CONTEXT_ONLY)
    context.add(request)
    run_until_idle(context)
    [handover] = context.take_handovers()
    first = unpack_tokens(handover.output.token_ids)
    generation.add(handed_over(request, first, len(handover.blocks)))
    run_until_idle(generation)
    [reservation] = generation.take_reservations()
    source = context._runner
    assert isinstance(source, LogitRunner)
    runner.copy_blocks_from(source, [handover.blocks[n] for n in reservation.positions], reservation.blocks)
    generation.adopt(reservation.key)
    assert first + tokens_of(run_until_idle(generation)[1], offset=1) == _expected(prompt, fields)


def _request(
    client_id: int, prompt: list[int], fields: SamplingFields, generated: Sequence[int] = (), phase: Phase = Phase.FULL
) -> GenerationRequest:
    whole: SamplingFields = {**fields, "max_tokens": MAX_TOKENS}
    return make_request(client_id, prompt, generated=generated, phase=phase, **whole)


def _expected(prompt: list[int], fields: SamplingFields) -> list[int]:
    return reference_output(prompt, MAX_TOKENS, SamplingParams(**fields), VOCAB, EOS)
