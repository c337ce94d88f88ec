"""Admission order, the token budget, preemption and the caps, seen through what the runner is given."""

from collections.abc import Iterable

import pytest

from tests.support.engine_requests import engine_config, handed_over, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import SequenceSlice, StepPlan
from twostroke.protocol.requests import Phase
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.worker import Role


def shapes(runner: FakeRunner) -> list[list[tuple[int, int]]]:
    """For every step the (request id, tokens) of its slices."""
    return [[(part.request_id, len(part.token_ids)) for part in plan.slices] for plan in runner.plans]


def prompt_of(client_id: int, length: int) -> Iterable[int]:
    """A prompt that shares no block with another client's."""
    return range(client_id * 50, client_id * 50 + length)


def test_long_prompts_are_computed_in_chunks_beside_those_that_decode() -> None:
    """Budget 8: the first decodes from its second step on and leaves 7 tokens to the chunks of the other."""
    runner = FakeRunner(eos_token_ids=())
    engine = Engine(runner, engine_config(max_batched_tokens=8), Role.AGGREGATED)
    engine.add(make_request(1, prompt_of(1, 6), max_tokens=5))
    engine.add(make_request(2, prompt_of(2, 20), max_tokens=1))
    run_until_idle(engine)
    assert shapes(runner) == [[(1, 6), (2, 2)], [(1, 1), (2, 7)], [(1, 1), (2, 7)], [(1, 1), (2, 4)], [(1, 1)]]
    assert [part.sample for plan in runner.plans for part in plan.slices if part.request_id == 2] == [False] * 3 + [
        True
    ]


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    """8 blocks: the second needs 6 beside the first's 4, so the small third waits behind it."""
    runner = FakeRunner(num_blocks=8, eos_token_ids=())
    engine = Engine(runner, engine_config(), Role.AGGREGATED)
    for client_id, length in ((1, 14), (2, 24), (3, 4)):
        engine.add(make_request(client_id, prompt_of(client_id, length), max_tokens=2))
    run_until_idle(engine)
    first_steps = {
        client_id: next(i for i, step in enumerate(shapes(runner)) if client_id in dict(step))
        for client_id in (1, 2, 3)
    }
    assert first_steps[1] < first_steps[2] < first_steps[3]


def test_no_more_run_than_max_sequences_or_tokens_of_a_step() -> None:
    """A budget below max_sequences bounds the batch, so that each step serves all that decode."""
    for config, most in ((engine_config(max_sequences=3), 3), (engine_config(max_batched_tokens=2), 2)):
        runner = FakeRunner(eos_token_ids=())
        engine = Engine(runner, config, Role.AGGREGATED)
        for client_id in range(1, 7):
            engine.add(make_request(client_id, [client_id], max_tokens=4))
        outputs = run_until_idle(engine)
        assert max(len(step) for step in shapes(runner)) == most
        assert all(len(tokens_of(outputs[client_id])) == 4 for client_id in range(1, 7))


def test_the_youngest_is_preempted_and_computed_again_with_the_same_tokens() -> None:
    """Six blocks for two sequences that grow to four each: the second gives way, the first never does."""
    runner = FakeRunner(num_blocks=6, eos_token_ids=())
    engine = Engine(runner, engine_config(prefix_caching=False), Role.AGGREGATED)
    for client_id in (1, 2):
        engine.add(make_request(client_id, prompt_of(client_id, 7), max_tokens=9))
    outputs = run_until_idle(engine)
    assert engine.load().counters.preemptions == 1
    for client_id in (1, 2):
        assert tokens_of(outputs[client_id]) == expected_output(list(prompt_of(client_id, 7)), 9, 1000)
    starts = {
        client_id: [part.start for plan in runner.plans for part in plan.slices if part.request_id == client_id]
        for client_id in (1, 2)
    }
    assert starts[1].count(0) == 1
    assert starts[2].count(0) == 2
    recomputed = [part for plan in runner.plans for part in plan.slices if part.request_id == 2 and part.start == 0][1]
    assert len(recomputed.token_ids) > 7
    assert recomputed.output_index == len(recomputed.token_ids) - 7


def test_with_prefix_caching_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """What was not evicted meanwhile is not computed twice."""
    runner = FakeRunner(num_blocks=7, eos_token_ids=())
    engine = Engine(runner, engine_config(), Role.AGGREGATED)
    for client_id in (1, 2):
        engine.add(make_request(client_id, prompt_of(client_id, 8), max_tokens=9))
    outputs = run_until_idle(engine)
    assert engine.load().counters.preemptions >= 1
    assert all(tokens_of(outputs[c]) == expected_output(list(prompt_of(c, 8)), 9, 1000) for c in (1, 2))
    assert sum(part.start == 0 for plan in runner.plans for part in plan.slices) == 2


def test_none_starves_behind_a_stream_of_small_requests() -> None:
    """A prompt that needs nearly the whole cache gets its turn though small requests never cease to come."""
    runner = FakeRunner(num_blocks=8, eos_token_ids=())
    engine = Engine(runner, engine_config(), Role.AGGREGATED)
    for client_id in (1, 2):
        engine.add(make_request(client_id, [client_id], max_tokens=6))
    engine.add(make_request(3, prompt_of(3, 28), max_tokens=3))
    done, client_id = False, 100
    for _ in range(60):
        client_id += 1
        engine.add(make_request(client_id, [client_id], max_tokens=6))
        done = done or any(output.key.client_id == 3 and output.final for output in engine.step())
        engine.check()
        if done:
            break
    assert done


@pytest.mark.parametrize(("cap", "reserved_at_once"), [(0.5, [2, 2]), (0.25, [1, 1, 1, 1]), (1.0, [4])])
def test_reservations_are_capped_and_served_in_order(cap: float, reserved_at_once: list[int]) -> None:
    """Four hand-overs of 2 blocks each into 8 blocks; as each round of transfers ends, the next are reserved."""
    engine = Engine(FakeRunner(num_blocks=8), engine_config(max_reserved_share=cap), Role.GENERATION)
    for client_id in range(1, 5):
        engine.add(handed_over(make_request(client_id, prompt_of(client_id, 7), max_tokens=3), [5], blocks=2))
    seen, order = [], []
    while engine.has_work:
        engine.step()
        engine.check()
        if reservations := engine.take_reservations():
            seen.append(len(reservations))
            order += [reservation.key.client_id for reservation in reservations]
            for reservation in reservations:
                engine.abort(reservation.key.client_id)
                engine.adopt(reservation.key)
    assert seen == reserved_at_once
    assert order == [1, 2, 3, 4]


def test_at_the_cap_of_leases_no_context_phase_is_admitted() -> None:
    """Cap 4 of 8 blocks: two prompts of 2 blocks run, the third waits until a lease ends, and the worker says so."""
    engine = Engine(FakeRunner(num_blocks=8, eos_token_ids=()), engine_config(), Role.CONTEXT)
    assert engine.load().admitting
    for client_id in (1, 2, 3):
        engine.add(make_request(client_id, prompt_of(client_id, 7), phase=Phase.CONTEXT_ONLY, max_tokens=9))
    run_until_idle(engine)
    first = engine.take_handovers()
    assert [handover.key.client_id for handover in first] == [1, 2]
    load = engine.load()
    assert (load.admitting, load.waiting, load.running, load.blocks.leased) == (False, 1, 0, 4)
    engine.end_lease(first[0].key)
    assert engine.has_work
    run_until_idle(engine)
    assert [handover.key.client_id for handover in engine.take_handovers()] == [3]
    engine.end_lease(first[1].key)
    assert engine.load().admitting


def test_a_prompt_above_the_cap_of_leases_is_admitted_alone() -> None:
    """Otherwise it would wait for ever."""
    engine = Engine(FakeRunner(num_blocks=8, eos_token_ids=()), engine_config(max_leased_share=0.25), Role.CONTEXT)
    engine.add(make_request(1, prompt_of(1, 16), phase=Phase.CONTEXT_ONLY, max_tokens=9))
    run_until_idle(engine)
    assert [len(handover.blocks) for handover in engine.take_handovers()] == [4]


def computed_prompt(prompt: list[int], block_size: int) -> FakeRunner:
    """A cache whose blocks 0, 1, ... hold the K and V of `prompt`."""
    runner = FakeRunner(block_size=block_size)
    blocks = range(-(-len(prompt) // block_size))
    runner.run(StepPlan([SequenceSlice(1, prompt, 0, blocks, sample=False, sampling=SamplingParams(), output_index=0)]))
    return runner


def test_a_sequence_preempted_after_it_was_planned_is_not_computed() -> None:
    """4 blocks: the younger decodes, then the older, with two tokens to compute, needs a third block of its own."""
    runner = FakeRunner(num_blocks=4, eos_token_ids=())
    engine = Engine(runner, engine_config(max_reserved_share=1.0), Role.GENERATION)
    prompts = {client_id: list(prompt_of(client_id, 7)) for client_id in (1, 2)}
    whole = {client_id: expected_output(prompt, 4, 1000) for client_id, prompt in prompts.items()}
    first = {1: whole[1][:2], 2: whole[2][:1]}
    for client_id, prompt in prompts.items():
        engine.add(handed_over(make_request(client_id, prompt, max_tokens=4), first[client_id], blocks=2))
    engine.step()
    for reservation in engine.take_reservations():
        source = computed_prompt(prompts[reservation.key.client_id], 4)
        runner.copy_blocks_from(source, reservation.positions, reservation.blocks)
        assert engine.adopt(reservation.key)
    outputs = run_until_idle(engine)
    assert shapes(runner)[0] == [(1, 2)]
    assert engine.load().counters.preemptions == 1
    for client_id in (1, 2):
        received = len(first[client_id])
        assert tokens_of(outputs[client_id], offset=received) == whole[client_id][received:]
