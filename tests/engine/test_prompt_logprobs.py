"""Logprobs of prompts: whole, once, with the first token, whatever the chunks, and past the prefix cache."""

import pytest

from tests.support.engine_requests import engine_config, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine import scheduler
from twostroke.engine.engine import Engine
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.prompt_logprobs import PromptLogprobs, PromptTokenLogprobs
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.worker import Role

PROMPT = list(range(10, 33))


def expected_scores(length: int, count: int) -> list[PromptTokenLogprobs]:
    """What the fake runner says of positions 1 to `length - 1`."""
    top = [((), ()) if count == 0 else ((position,), (0.0,)) for position in range(length)]
    return [PromptTokenLogprobs(-position, position, *top[position]) for position in range(1, length)]


def scores_of(outputs: list[SequenceOutput]) -> list[PromptTokenLogprobs]:
    """The prompt logprobs; they come with the first output and no other."""
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    assert outputs[0].prompt_logprobs is not None
    return outputs[0].prompt_logprobs.unpack()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 23])
@pytest.mark.parametrize("budget", [2, 16, 64])
@pytest.mark.parametrize("count", [0, 1])
def test_every_token_but_the_first_has_its_logprob(length: int, budget: int, count: int) -> None:
    """Around the edges of blocks (4 tokens) and chunks; output tokens are as without."""
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(max_batched_tokens=budget), Role.AGGREGATED)
    engine.add(make_request(1, PROMPT[:length], max_tokens=3, prompt_logprobs=count))
    outputs = run_until_idle(engine)[1]
    assert scores_of(outputs) == expected_scores(length, count)
    assert tokens_of(outputs) == expected_output(PROMPT[:length], 3, 1000)


def test_the_prefix_cache_is_bypassed_but_filled() -> None:
    """The same prompt again: nothing is taken from the cache, and the next request without logprobs finds it there."""
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(), Role.AGGREGATED)
    for client_id in (1, 2):
        engine.add(make_request(client_id, PROMPT, max_tokens=1, prompt_logprobs=0))
        outputs = run_until_idle(engine)[client_id]
        assert (outputs[0].cached_tokens, len(scores_of(outputs))) == (0, 22)
    engine.add(make_request(3, PROMPT, max_tokens=1))
    assert run_until_idle(engine)[3][0].cached_tokens == 20


def test_preempted_sequences_score_their_prompt_once() -> None:
    """Preempted before the first token they start anew; after it they do not score again, and may use the cache."""
    runner = FakeRunner(num_blocks=9, eos_token_ids=())
    engine = Engine(runner, engine_config(max_batched_tokens=6), Role.AGGREGATED)
    for client_id in range(6):
        engine.add(make_request(client_id, PROMPT[client_id : client_id + 9], max_tokens=14, prompt_logprobs=1))
    outputs = run_until_idle(engine)
    assert engine.load().counters.preemptions > 0
    for client_id in range(6):
        assert scores_of(outputs[client_id]) == expected_scores(9, 1)
        assert tokens_of(outputs[client_id]) == expected_output(PROMPT[client_id : client_id + 9], 14, 1000)


def test_a_resumed_request_does_not_score_again() -> None:
    """Whoever made the first token sent the logprobs with it."""
    whole = expected_output(PROMPT, 4, 1000)
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(), Role.AGGREGATED)
    engine.add(make_request(1, PROMPT, generated=whole[:1], max_tokens=4, prompt_logprobs=1))
    assert [output.prompt_logprobs for output in run_until_idle(engine)[1]] == [None] * 3


def test_the_context_phase_hands_them_over_with_the_first_token() -> None:
    """They travel in the same message."""
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(), Role.CONTEXT)
    engine.add(make_request(1, PROMPT, phase=Phase.CONTEXT_ONLY, max_tokens=4, prompt_logprobs=1))
    run_until_idle(engine)
    [handover] = engine.take_handovers()
    assert handover.output.prompt_logprobs is not None
    assert handover.output.prompt_logprobs.unpack() == expected_scores(23, 1)


def test_scored_prompts_share_a_budget_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scored token needs a row of logits; other prompts still use the whole budget."""
    monkeypatch.setattr(scheduler, "MAX_SCORED_TOKENS", 5)
    runner = FakeRunner(eos_token_ids=())
    engine = Engine(runner, engine_config(max_batched_tokens=24), Role.AGGREGATED)
    engine.add(make_request(1, PROMPT[:8], max_tokens=1, prompt_logprobs=0))
    engine.add(make_request(2, PROMPT[1:9], max_tokens=1, prompt_logprobs=0))
    engine.add(make_request(3, PROMPT[2:10], max_tokens=1))
    run_until_idle(engine)
    assert [[len(part.token_ids) for part in plan.slices] for plan in runner.plans] == [[5, 8], [3, 3], [5]]


def test_buffers_that_do_not_go_together_are_an_error() -> None:
    """A cut-off message must not become wrong numbers."""
    whole = PromptLogprobs.pack([-1.0, -2.0], [1, 5], [[3], [4]], [[-0.5], [-0.25]])
    assert whole.unpack()[1] == PromptTokenLogprobs(-2.0, 5, (4,), (-0.25,))
    for broken in (
        PromptLogprobs(whole.chosen[:4], whole.ranks, whole.top_ids, whole.top),
        PromptLogprobs(whole.chosen, whole.ranks, whole.top_ids[:4], whole.top),
        PromptLogprobs(whole.chosen, whole.ranks, whole.top_ids, whole.top[:3]),
    ):
        with pytest.raises(ProtocolError):
            broken.unpack()
