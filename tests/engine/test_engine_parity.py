"""The tokens of a request do not depend on how it is scheduled."""

import pytest

from tests.support.engine_requests import engine_config, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.protocol.worker import Role

BLOCK_SIZE = 4
PROMPTS = [
    [(seed * 7 + position * 3) % 90 for position in range(length)] for seed in (0, 1) for length in (1, 3, 4, 5, 8, 23)
]
MAX_TOKENS = 14


@pytest.mark.parametrize("max_batched_tokens", [2, 5, 64], ids=lambda budget: f"budget {budget}")
@pytest.mark.parametrize("num_blocks", [10, 200], ids=["preempting", "ample"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
def test_tokens_are_the_same_whatever_the_schedule(
    max_batched_tokens: int,
    num_blocks: int,
    prefix_caching: bool,  # noqa: FBT001 - a case
) -> None:
    """Every prompt twice, so that the second finds the first's blocks; alone it would give the same."""
    runner = FakeRunner(num_blocks, BLOCK_SIZE, eos_token_ids=())
    config = engine_config(max_batched_tokens=max_batched_tokens, prefix_caching=prefix_caching)
    engine = Engine(runner, config, Role.AGGREGATED)
    for client_id, prompt in enumerate(PROMPTS * 2):
        engine.add(make_request(client_id, prompt, max_tokens=MAX_TOKENS))
    outputs = run_until_idle(engine)
    for client_id, prompt in enumerate(PROMPTS * 2):
        assert tokens_of(outputs[client_id]) == expected_output(prompt, MAX_TOKENS, 1000)
    load = engine.load()
    assert (load.counters.preemptions > 0) == (num_blocks == 10)
    assert (load.counters.cached_tokens > 0) == prefix_caching
    assert max(plan.tokens for plan in runner.plans) <= max_batched_tokens
