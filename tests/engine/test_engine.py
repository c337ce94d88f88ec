"""The engine's step loop: outputs, errors, aborts, deadlines, load and the prefix cache."""

import pytest

from tests.support.engine_requests import engine_config, is_idle, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.protocol.errors import ErrorKind, InvalidRequestError, OverloadedError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.worker import BlockCounts, Role

PROMPT = list(range(10, 21))


def make_engine(runner: FakeRunner | None = None, **config: int) -> Engine:
    """An engine for both phases over an instant runner without end-of-sequence ids."""
    return Engine(runner or FakeRunner(eos_token_ids=()), engine_config(**config), Role.AGGREGATED)  # type: ignore[arg-type] # `config` holds integers only


def test_every_token_comes_once_with_its_offset_and_the_last_is_final() -> None:
    """One output a step; the first says how many prompt tokens were cached."""
    engine = make_engine()
    engine.add(make_request(1, PROMPT, max_tokens=5))
    outputs = run_until_idle(engine)[1]
    assert tokens_of(outputs) == expected_output(PROMPT, 5, 1000)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert [output.cached_tokens for output in outputs] == [0, None, None, None, None]
    assert engine.load().blocks == BlockCounts(free=61, cached=3)


@pytest.mark.parametrize(("length", "told"), [(1, [1]), (2, [1, 1]), (4, [1, 3]), (5, [1, 3, 1]), (8, [1, 3, 3, 1])])
def test_tokens_that_may_wait_are_told_together_but_for_the_first_and_the_end(length: int, told: list[int]) -> None:
    """Nothing else changes: tokens, offsets, logprobs and the end are those of single outputs."""
    engine = make_engine()
    engine.add(make_request(1, PROMPT, max_tokens=length, logprobs=0))
    engine.add(make_request(2, PROMPT, max_tokens=length, logprobs=0, tell_every=3))
    outputs = run_until_idle(engine)
    singly, together = outputs[1], outputs[2]
    assert [len(output.token_ids) // 4 for output in together] == told
    assert [output.offset for output in together] == [sum(told[:index]) for index in range(len(told))]
    assert tokens_of(together) == tokens_of(singly)
    assert [one for output in together for one in output.logprobs or ()] == [
        one for output in singly for one in output.logprobs or ()
    ]
    assert [output.final for output in together] == [False] * (len(told) - 1) + [True]


def test_tokens_that_waited_are_dropped_by_an_error() -> None:
    """Whoever lets tokens wait has no use for a part of them; the offset goes on from what was told."""
    engine = make_engine()
    engine.add(make_request(1, PROMPT, max_tokens=9, tell_every=5))
    outputs = [output for _ in range(3) for output in engine.step()]
    engine.abort(1)
    outputs += engine.step()
    assert [(output.offset, output.error is not None) for output in outputs] == [(0, False), (1, True)]


def test_a_stop_token_ends_the_sequence_and_is_part_of_its_output() -> None:
    """`stop_token_id` names it, for end-of-sequence and stop ids alike."""
    output = expected_output(PROMPT, 5, 1000)
    engine = make_engine()
    engine.add(make_request(1, PROMPT, max_tokens=5, stop_token_ids=(output[2],)))
    outputs = run_until_idle(engine)[1]
    assert tokens_of(outputs) == output[:3]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, output[2])


def test_min_tokens_forbids_the_token_that_would_end_it() -> None:
    """The engine passes the ids on; the runner chooses another token."""
    ending = tuple(expected_output(PROMPT, 1, 1000))
    engine = make_engine(FakeRunner(eos_token_ids=ending))
    engine.add(make_request(1, PROMPT, max_tokens=5, min_tokens=5))
    assert tokens_of(run_until_idle(engine)[1]) == expected_output(PROMPT, 5, 1000, ending, min_tokens=5)


def test_a_full_prefix_hit_computes_the_last_block_again_in_a_private_one() -> None:
    """8 prompt tokens in 2 blocks: the second run shares one, and its copy of the other is not kept twice."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner)
    for client_id in (1, 2):
        engine.add(make_request(client_id, PROMPT[:8], max_tokens=1))
        outputs = run_until_idle(engine)[client_id]
        assert tokens_of(outputs) == expected_output(PROMPT[:8], 1, 1000)
        assert outputs[0].cached_tokens == (0 if client_id == 1 else 4)
    first, second = (plan.slices[0] for plan in runner.plans)
    assert (second.start, len(second.token_ids)) == (4, 4)
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert engine.load().blocks == BlockCounts(free=62, cached=2)


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    """Equal prompts under another salt share nothing."""
    engine = make_engine()
    for client_id, salt in ((1, "a"), (2, "b")):
        engine.add(make_request(client_id, PROMPT, max_tokens=1, cache_salt=salt))
        assert run_until_idle(engine)[client_id][0].cached_tokens == 0


def test_resume_goes_on_after_the_generated_tokens() -> None:
    """Offsets start behind them, `max_tokens` counts them, and the tokens are those of one whole run."""
    whole = expected_output(PROMPT, 8, 1000)
    engine = make_engine()
    engine.add(make_request(1, PROMPT, generated=whole[:3], max_tokens=8))
    assert tokens_of(run_until_idle(engine)[1], offset=3) == whole[3:]


def test_logprobs_come_with_their_token() -> None:
    """One entry a token where asked for."""
    engine = make_engine()
    engine.add(make_request(1, PROMPT, max_tokens=2, logprobs=1))
    assert [output.logprobs is not None and len(output.logprobs) for output in run_until_idle(engine)[1]] == [1, 1]


def test_add_refuses_what_cannot_run_and_what_is_known_already() -> None:
    """Nothing is queued then."""
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=r"prompt \(11 tokens\) plus max_tokens \(246\)"):
        engine.add(make_request(1, PROMPT, max_tokens=246))
    assert is_idle(engine)
    engine.add(make_request(1, PROMPT, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="is known here already"):
        engine.add(make_request(1, PROMPT, max_tokens=1))


def test_the_queue_is_bounded() -> None:
    """One more than `max_waiting` is refused, until the engine has admitted some."""
    engine = make_engine(max_waiting=2)
    for client_id in (1, 2):
        engine.add(make_request(client_id, PROMPT, max_tokens=9))
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        engine.add(make_request(3, PROMPT, max_tokens=9))
    engine.step()
    engine.add(make_request(3, PROMPT, max_tokens=9))


def test_abort_ends_one_index_or_all_and_each_has_one_final_event() -> None:
    """Waiting or running; aborting again, or an unknown request, changes nothing."""
    engine = make_engine(max_sequences=2)
    for index in range(3):
        engine.add(make_request(1, [1, 2, 3 + index], index=index, max_tokens=9))
    first = {output.key.index: output for output in engine.step()}
    assert engine.abort(1, index=1) == [SequenceKey(1, 1)]
    assert engine.abort(1, index=1) == engine.abort(99) == []
    assert engine.abort(1) == [SequenceKey(1, 0), SequenceKey(1, 2)]
    assert not is_idle(engine)
    final = {output.key.index: output for output in engine.step()}
    assert {index: (output.offset, output.error and output.error.kind) for index, output in final.items()} == {
        0: (1, ErrorKind.ABORTED),
        1: (1, ErrorKind.ABORTED),
        2: (0, ErrorKind.ABORTED),
    }
    assert first.keys() == {0, 1}
    assert is_idle(engine)
    assert engine.load().blocks == BlockCounts(free=64)


def test_a_request_ends_at_its_deadline_waiting_or_running() -> None:
    """Measured from its arrival by the engine's clock."""
    now = 100.0
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(max_sequences=1), Role.AGGREGATED, clock=lambda: now)
    for client_id, deadline_s in ((1, 5.0), (2, 7.0), (3, None)):
        engine.add(make_request(client_id, PROMPT, max_tokens=200, deadline_s=deadline_s))
    engine.step()
    now = 104.9
    assert [output.error for output in engine.step()] == [None]
    now = 107.0
    outputs = engine.step()
    assert [(o.key.client_id, o.error.kind, o.offset) for o in outputs if o.error] == [
        (1, ErrorKind.DEADLINE, 2),
        (2, ErrorKind.DEADLINE, 0),
    ]
    assert [o.key.client_id for o in outputs if not o.error] == [3]


def test_load_counts_sequences_tokens_and_blocks() -> None:
    """After one step of 16 tokens: the first decodes, the second is partly computed, the third waits."""
    engine = make_engine()
    for client_id, length in ((1, 11), (2, 9), (3, 7)):
        engine.add(make_request(client_id, range(client_id * 20, client_id * 20 + length), max_tokens=3))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.admitting) == (2, 1, 4 + 7, True)
    assert load.blocks == BlockCounts(free=64 - 6, active=6)
    assert (load.counters.steps, load.counters.prompt_tokens, load.counters.output_tokens) == (1, 16, 1)


def test_an_idle_engine_has_no_work_and_a_step_runs_nothing() -> None:
    """The runner is not called for nothing."""
    runner = FakeRunner()
    engine = make_engine(runner)
    assert is_idle(engine)
    assert engine.step() == []
    assert runner.plans == []


def test_a_failure_of_the_runner_is_fatal() -> None:
    """It leaves `step` as it is."""
    runner = FakeRunner(error=OSError("device lost"))
    engine = make_engine(runner)
    engine.add(make_request(1, PROMPT, max_tokens=1))
    with pytest.raises(OSError, match="device lost"):
        engine.step()
