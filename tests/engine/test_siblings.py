"""Requests for several sequences: one prefill, first tokens from the same logits, and then each by itself."""

import pytest

from tests.support.engine_requests import (
    LAYOUT,
    engine_config,
    handed_over,
    is_idle,
    make_request,
    run_until_idle,
    tokens_of,
)
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.engine.handover import Handover
from twostroke.protocol.errors import ErrorKind, InvalidRequestError, OverloadedError, TransferError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import BlockCounts, Role

PROMPT = list(range(10, 21))
"""11 tokens: two full blocks of 4, and 3 tokens of a third."""


def make_engine(role: Role = Role.AGGREGATED, runner: FakeRunner | None = None, **config: int) -> Engine:
    """An engine over an instant runner without end-of-sequence ids."""
    return Engine(runner or FakeRunner(eos_token_ids=()), engine_config(**config), role)  # type: ignore[arg-type] # `config` holds integers only


def by_index(engine: Engine, client_id: int = 1) -> dict[int, list[SequenceOutput]]:
    """Run to the end; outputs of one request by index."""
    outputs: dict[int, list[SequenceOutput]] = {}
    for output in run_until_idle(engine)[client_id]:
        outputs.setdefault(output.key.index, []).append(output)
    return outputs


def computed(runner: FakeRunner) -> list[list[int]]:
    """The lengths of the slices of every step."""
    return [[len(part.token_ids) for part in plan.slices] for plan in runner.plans]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_one_prefill_makes_the_first_token_of_each(*, prefix_caching: bool) -> None:
    """Each index has its own seed; the siblings compute no more of the prompt than its last, partly filled block."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner=runner, prefix_caching=prefix_caching)
    engine.add(make_request(1, PROMPT, n=3, max_tokens=4, seed=5))
    outputs = by_index(engine)
    assert {index: tokens_of(one) for index, one in outputs.items()} == {
        index: expected_output(PROMPT, 4, 1000, seed=5 + index) for index in range(3)
    }
    assert [one[0].cached_tokens for one in outputs.values()] == [0, 0, 0]
    assert computed(runner) == [[11], [1, 4, 4], [1, 1, 1], [1, 1, 1]]
    assert [len(part.siblings) for plan in runner.plans for part in plan.slices] == [2, *[0] * 9]
    blocks = engine.load().blocks
    assert blocks.free + blocks.cached == 64


def test_greedy_siblings_are_equal_and_an_index_is_what_its_request_alone_would_be() -> None:
    """Index i has seed + i: the request with that seed alone gives the same tokens."""
    for index in range(3):
        engine = make_engine()
        engine.add(make_request(1, PROMPT, n=3, max_tokens=4, seed=7))
        engine.add(make_request(2, PROMPT, max_tokens=4, seed=7 + index))
        outputs = run_until_idle(engine)
        ours = [output for output in outputs[1] if output.key.index == index]
        assert tokens_of(ours) == tokens_of(outputs[2])


def test_siblings_decode_from_a_full_prompt_at_once() -> None:
    """A prompt of whole blocks leaves nothing to compute again."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner=runner)
    engine.add(make_request(1, PROMPT[:8], n=2, max_tokens=3))
    by_index(engine)
    assert computed(runner) == [[8], [1, 1], [1, 1]]


def test_siblings_without_a_slot_wait_for_one() -> None:
    """More sequences than may run: all are right, and no more than the bound ever run."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner=runner, max_sequences=2)
    engine.add(make_request(1, PROMPT, n=5, max_tokens=3))
    outputs = by_index(engine)
    assert [tokens_of(outputs[index]) for index in range(5)] == [
        expected_output(PROMPT, 3, 1000, seed=index) for index in range(5)
    ]
    assert max(map(len, computed(runner))) == 2


def test_siblings_in_a_small_cache_are_preempted_and_come_back() -> None:
    """Four sequences of six blocks each in nine blocks, of which they share two."""
    engine = make_engine(runner=FakeRunner(eos_token_ids=(), num_blocks=9))
    engine.add(make_request(1, PROMPT, n=4, max_tokens=12))
    outputs = by_index(engine)
    assert [tokens_of(outputs[index]) for index in range(4)] == [
        expected_output(PROMPT, 12, 1000, seed=index) for index in range(4)
    ]
    assert engine.load().counters.preemptions > 0
    assert engine.load().counters.cached_tokens == 0


def test_prompt_logprobs_reach_every_index_and_are_computed_once() -> None:
    """The siblings get the scores that the leader's chunks gave, and still share its blocks."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner=runner, max_batched_tokens=8)
    engine.add(make_request(1, PROMPT, n=2, max_tokens=2, prompt_logprobs=1))
    first, second = by_index(engine).values()
    assert first[0].prompt_logprobs is not None
    assert first[0].prompt_logprobs == second[0].prompt_logprobs
    assert computed(runner) == [[8], [3], [1, 4]]


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_an_abort_before_the_first_token_ends_one_index(aborted: int) -> None:
    """If the one that computed the prompt goes, the next takes over what it left in the cache."""
    runner = FakeRunner(eos_token_ids=())
    engine = make_engine(runner=runner, max_batched_tokens=8)
    engine.add(make_request(1, PROMPT, n=3, max_tokens=3))
    engine.step()
    assert engine.abort(1, aborted) == [SequenceKey(1, aborted)]
    outputs = by_index(engine)
    for index in range(3):
        if index == aborted:
            [final] = outputs[index]
            assert final.error is not None
            assert final.error.kind is ErrorKind.ABORTED
        else:
            assert tokens_of(outputs[index]) == expected_output(PROMPT, 3, 1000, seed=index)
    assert [part.start for plan in runner.plans for part in plan.slices][:2] == [0, 8]


def test_an_abort_of_the_request_ends_all() -> None:
    """Before the first token, and after it."""
    for steps in (0, 1, 2):
        engine = make_engine()
        engine.add(make_request(1, PROMPT, n=3, max_tokens=9))
        for _ in range(steps):
            engine.step()
        assert len(engine.abort(1)) == 3
        outputs = by_index(engine)
        assert all(one[-1].error is not None for one in outputs.values())
        assert is_idle(engine)
        assert len(engine.client_ids()) == 0


def test_the_first_token_may_end_some_and_not_others() -> None:
    """Index 0 stops at once; the others decode from the blocks that it computed."""
    first = expected_output(PROMPT, 1, 1000)[0]
    engine = make_engine()
    engine.add(make_request(1, PROMPT, n=3, max_tokens=4, stop_token_ids=(first,)))
    outputs = by_index(engine)
    assert (len(outputs[0]), outputs[0][0].finish_reason) == (1, FinishReason.STOP)
    for index in (1, 2):
        assert tokens_of(outputs[index]) == expected_output(PROMPT, 4, 1000, [first], seed=index)


def test_all_of_a_request_count_against_the_queue() -> None:
    """A request for more than may ever wait is wrong; one for more than may wait now may come again."""
    engine = make_engine(max_waiting=3)
    with pytest.raises(InvalidRequestError, match="n of 4"):
        engine.add(make_request(1, PROMPT, n=4))
    engine.add(make_request(2, PROMPT, n=2))
    assert engine.load().waiting == 2
    with pytest.raises(OverloadedError, match="2 requests wait"):
        engine.add(make_request(3, PROMPT, n=2))


# --- hand-overs ---


def context_handovers(engine: Engine, request: GenerationRequest) -> tuple[list[SequenceOutput], list[Handover]]:
    """Run a context phase."""
    engine.add(request)
    outputs = run_until_idle(engine).get(request.key.client_id, [])
    return outputs, engine.take_handovers()


def test_a_context_phase_leases_one_set_of_blocks_to_n_readers() -> None:
    """Three hand-overs of the same blocks; they stay leased until the last reader has ended, in any order."""
    runner = FakeRunner(eos_token_ids=(), num_blocks=16)
    engine = make_engine(Role.CONTEXT, runner)
    _, handovers = context_handovers(engine, make_request(1, PROMPT, n=3, phase=Phase.CONTEXT_ONLY, max_tokens=6))
    assert [handover.key.index for handover in handovers] == [0, 1, 2]
    assert len({handover.blocks for handover in handovers}) == 1
    assert [unpack_tokens(one.output.token_ids) for one in handovers] == [
        expected_output(PROMPT, 1, 1000, seed=index) for index in range(3)
    ]
    assert computed(runner) == [[11]]
    for key, leased in ((1, 3), (0, 3), (2, 0)):
        assert engine.load().blocks.leased == 3
        engine.end_lease(SequenceKey(1, key))
        engine.check()
        assert engine.load().blocks.leased == leased
    assert engine.load().blocks == BlockCounts(free=14, cached=2)
    assert not engine.unfinished


def test_an_index_that_its_first_token_ended_has_no_lease() -> None:
    """Its siblings do, on the blocks that it computed."""
    first = expected_output(PROMPT, 1, 1000)[0]
    engine = make_engine(Role.CONTEXT)
    request = make_request(1, PROMPT, n=3, phase=Phase.CONTEXT_ONLY, max_tokens=6, stop_token_ids=(first,))
    outputs, handovers = context_handovers(engine, request)
    assert [(output.key.index, output.finish_reason) for output in outputs] == [(0, FinishReason.STOP)]
    assert [handover.key.index for handover in handovers] == [1, 2]
    assert engine.load().blocks.leased == 3
    engine.check()


def test_an_abort_of_one_index_revokes_its_lease_only() -> None:
    """The others' readers are not disturbed."""
    engine = make_engine(Role.CONTEXT)
    context_handovers(engine, make_request(1, PROMPT, n=3, phase=Phase.CONTEXT_ONLY, max_tokens=6))
    assert engine.abort(1, 1) == [SequenceKey(1, 1)]
    assert engine.take_cancellations() == [SequenceKey(1, 1)]
    engine.end_lease(SequenceKey(1, 1))
    assert engine.load().blocks.leased == 3
    assert len(engine.abort(1)) == 2


class Handed:
    """A generation engine, to which three siblings were handed over."""

    def __init__(self, *, prefix_caching: bool = True) -> None:
        self.context_runner = FakeRunner(eos_token_ids=(), num_blocks=16)
        context = make_engine(Role.CONTEXT, self.context_runner)
        request = make_request(1, PROMPT, n=3, phase=Phase.CONTEXT_ONLY, max_tokens=4)
        _, self.handovers = context_handovers(context, request)
        self.runner = FakeRunner(eos_token_ids=())
        self.engine = make_engine(Role.GENERATION, self.runner, prefix_caching=prefix_caching)
        for one, handover in zip(request.sequences(), self.handovers, strict=True):
            self.engine.add(handed_over(one, unpack_tokens(handover.output.token_ids), len(handover.blocks)))

    def reserved(self) -> dict[int, tuple[int, ...]]:
        """Step; which positions each index that got its blocks lacks, once they are filled."""
        assert self.engine.step() == []
        reservations = self.engine.take_reservations()
        for reservation in reservations:
            source = [self.handovers[0].blocks[position] for position in reservation.positions]
            self.runner.copy_blocks_from(self.context_runner, source, reservation.blocks)
        self.engine.check()
        return {one.key.index: one.positions for one in reservations}


def test_siblings_are_fetched_after_the_first_and_lack_only_the_last_block() -> None:
    """The prompt's full blocks travel once."""
    handed = Handed()
    assert LAYOUT.block_size == 4
    assert handed.reserved() == {0: (0, 1, 2)}
    assert handed.reserved() == {}
    assert handed.engine.adopt(SequenceKey(1, 0))
    assert len(handed.engine.step()) == 1
    rest = {one.key.index: one.positions for one in handed.engine.take_reservations()}
    assert rest == {1: (2,), 2: (2,)}


def test_without_prefix_caching_each_is_fetched_by_itself() -> None:
    """Nothing could be shared, so nobody waits."""
    assert Handed(prefix_caching=False).reserved() == dict.fromkeys(range(3), (0, 1, 2))


@pytest.mark.parametrize("blocks_safe", [True, False])
def test_a_failed_transfer_lets_the_next_sibling_fetch(*, blocks_safe: bool) -> None:
    """It then leads the others."""
    handed = Handed()
    handed.reserved()
    handed.engine.fail_reservation(SequenceKey(1, 0), TransferError("gone"), blocks_safe=blocks_safe)
    [failed] = handed.engine.step()
    assert failed.error is not None
    assert [one.key.index for one in handed.engine.take_reservations()] == [1]


@pytest.mark.parametrize("steps", [0, 1])
def test_an_abort_of_the_one_being_fetched_lets_the_next_sibling_fetch(steps: int) -> None:
    """Before its blocks are reserved, and while they are written."""
    handed = Handed()
    for _ in range(steps):
        handed.reserved()
    handed.engine.abort(1, 0)
    [aborted] = handed.engine.step()
    assert aborted.key.index == 0
    assert [one.key.index for one in handed.engine.take_reservations()] == [1]
    assert handed.engine.take_cancellations() == [SequenceKey(1, 0)] * steps
