"""Hand-overs: leases on the context side, reservations on the generation side, and every way that they end."""

import pytest

from tests.support.engine_requests import engine_config, handed_over, is_idle, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.engine.handover import Handover, Reservation
from twostroke.protocol.errors import ErrorKind, TransferError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import BlockCounts, Role

PROMPT = list(range(10, 21))
TRANSFER_FAILED = TransferError("the context worker is gone")


class Pair:
    """A context and a generation engine with a cache each; tests play the role parts."""

    def __init__(self) -> None:
        self.context_runner = FakeRunner(eos_token_ids=(), num_blocks=16)
        self.generation_runner = FakeRunner(eos_token_ids=(), num_blocks=16)
        self.context = Engine(self.context_runner, engine_config(), Role.CONTEXT)
        self.generation = Engine(self.generation_runner, engine_config(), Role.GENERATION)

    def hand_over(self, request: GenerationRequest) -> Handover:
        """Run the context phase."""
        self.context.add(request)
        run_until_idle(self.context)
        [handover] = self.context.take_handovers()
        return handover

    def reserve(self, request: GenerationRequest, handover: Handover) -> Reservation:
        """Let the generation engine reserve what it lacks."""
        first = unpack_tokens(handover.output.token_ids)
        self.generation.add(handed_over(request, first, len(handover.blocks)))
        assert run_until_idle(self.generation) == {}
        [reservation] = self.generation.take_reservations()
        return reservation

    def transfer(self, handover: Handover, reservation: Reservation) -> None:
        """Move the K and V that the reservation lacks."""
        source = [handover.blocks[position] for position in reservation.positions]
        self.generation_runner.copy_blocks_from(self.context_runner, source, reservation.blocks)


def context_request(client_id: int = 1, *, length: int = 11, max_tokens: int = 6) -> GenerationRequest:
    """A context phase over the first `length` tokens of `PROMPT`."""
    return make_request(client_id, PROMPT[:length], phase=Phase.CONTEXT_ONLY, max_tokens=max_tokens)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (11, 3)])
def test_a_request_goes_through_both_roles_with_the_tokens_of_one(length: int, blocks: int) -> None:
    """The lease covers the prompt to its partly filled last block; decoding starts with the first token as input."""
    pair = Pair()
    request = context_request(length=length)
    handover = pair.hand_over(request)
    assert (len(handover.blocks), handover.prompt_tokens) == (blocks, length)
    assert (handover.output.offset, handover.output.final, handover.output.cached_tokens) == (0, False, 0)
    assert pair.context.load().blocks == BlockCounts(free=16 - blocks, leased=blocks)

    reservation = pair.reserve(request, handover)
    assert reservation.positions == tuple(range(blocks))
    assert pair.generation.load().blocks == BlockCounts(free=16 - blocks, reserved=blocks)

    pair.transfer(handover, reservation)
    assert pair.generation.adopt(reservation.key)
    pair.context.end_lease(handover.key)
    pair.context.end_lease(handover.key)
    outputs = run_until_idle(pair.generation)[1]
    whole = expected_output(PROMPT[:length], 6, 1000)
    assert unpack_tokens(handover.output.token_ids) + tokens_of(outputs, offset=1) == whole
    assert outputs[0].cached_tokens is None
    full = length // 4
    assert pair.context.load().blocks == BlockCounts(free=16 - full, cached=full)
    assert [len(part.token_ids) for plan in pair.generation_runner.plans for part in plan.slices] == [1] * 5


def test_what_the_generation_cache_holds_is_pinned_and_not_fetched_again() -> None:
    """The second request with the same prompt lacks the partly filled block only; both leases share the full ones."""
    pair = Pair()
    for client_id, positions in ((1, (0, 1, 2)), (2, (2,))):
        request = context_request(client_id)
        handover = pair.hand_over(request)
        reservation = pair.reserve(request, handover)
        assert reservation.positions == positions
        pair.transfer(handover, reservation)
        assert pair.generation.load().blocks.active == 3 - len(positions)
        assert pair.generation.adopt(reservation.key)
        outputs = run_until_idle(pair.generation)[client_id]
        assert tokens_of(outputs, offset=1) == expected_output(PROMPT, 6, 1000)[1:]
    assert pair.context.load().blocks.leased == 4


def test_a_prompt_wholly_in_the_generation_cache_needs_an_empty_fetch() -> None:
    """It still ends the lease, and nothing is recomputed: the logits of the last prompt token are not needed."""
    pair = Pair()
    for client_id in (1, 2):
        request = context_request(client_id, length=8)
        handover = pair.hand_over(request)
        reservation = pair.reserve(request, handover)
        pair.transfer(handover, reservation)
        assert pair.generation.adopt(reservation.key)
        outputs = run_until_idle(pair.generation)
        assert tokens_of(outputs[client_id], offset=1) == expected_output(PROMPT[:8], 6, 1000)[1:]
    assert reservation.positions == reservation.blocks == ()
    assert all(len(part.token_ids) == 1 for plan in pair.generation_runner.plans for part in plan.slices)


def test_a_context_phase_that_ends_the_request_leases_nothing() -> None:
    """The client asked for one token: there is nothing to hand over."""
    engine = Engine(FakeRunner(eos_token_ids=()), engine_config(), Role.CONTEXT)
    engine.add(context_request(max_tokens=1))
    [output] = run_until_idle(engine)[1]
    assert output.finish_reason is FinishReason.LENGTH
    assert engine.take_handovers() == []
    assert engine.load().blocks == BlockCounts(free=62, cached=2)


def test_a_resumed_context_phase_leases_prompt_and_generated_tokens() -> None:
    """11 prompt and 3 generated tokens: 4 blocks, and the new token is the fourth of the output."""
    whole = expected_output(PROMPT, 6, 1000)
    pair = Pair()
    request = make_request(1, PROMPT, generated=whole[:3], phase=Phase.CONTEXT_ONLY, max_tokens=6)
    handover = pair.hand_over(request)
    assert (len(handover.blocks), handover.output.offset) == (4, 3)
    assert unpack_tokens(handover.output.token_ids) == whole[3:4]
    reservation = pair.reserve(request, handover)
    pair.transfer(handover, reservation)
    assert pair.generation.adopt(reservation.key)
    assert tokens_of(run_until_idle(pair.generation)[1], offset=4) == whole[4:]


def test_aborting_a_leased_request_only_asks_for_the_end_of_the_lease() -> None:
    """It had its final event (the hand-over); the blocks stay until the role part says that none reads them."""
    pair = Pair()
    handover = pair.hand_over(context_request())
    assert pair.context.abort(1) == [handover.key]
    assert pair.context.take_cancellations() == [handover.key]
    assert pair.context.step() == []
    assert pair.context.load().blocks.leased == 3
    pair.context.end_lease(handover.key)
    assert pair.context.load().blocks == BlockCounts(free=14, cached=2)


@pytest.mark.parametrize("landed", [True, False], ids=["the transfer was done already", "cancelled"])
def test_aborting_during_a_transfer_keeps_the_blocks_until_it_has_ended(landed: bool) -> None:  # noqa: FBT001 - a case
    """The final event comes at once; the reserved blocks may still be written and stay."""
    pair = Pair()
    request = context_request()
    reservation = pair.reserve(request, pair.hand_over(request))
    assert pair.generation.abort(1) == [reservation.key]
    assert pair.generation.take_cancellations() == [reservation.key]
    [output] = pair.generation.step()
    assert output.error is not None
    assert (output.error.kind, output.offset) == (ErrorKind.ABORTED, 1)
    assert pair.generation.load().blocks.reserved == 3
    assert pair.generation.abort(1) == []
    if landed:
        assert not pair.generation.adopt(reservation.key)
    else:
        pair.generation.fail_reservation(reservation.key, TRANSFER_FAILED, blocks_safe=True)
    assert pair.generation.step() == []
    assert pair.generation.load().blocks == BlockCounts(free=16)
    assert not pair.generation.adopt(reservation.key)


@pytest.mark.parametrize("blocks_safe", [True, False])
def test_a_failed_transfer_fails_its_request_and_unsafe_blocks_are_quarantined(blocks_safe: bool) -> None:  # noqa: FBT001 - a case
    """Exactly one final event; quarantined blocks come back with the proof, once."""
    pair = Pair()
    request = context_request()
    reservation = pair.reserve(request, pair.hand_over(request))
    pair.generation.fail_reservation(reservation.key, TRANSFER_FAILED, blocks_safe=blocks_safe)
    pair.generation.fail_reservation(reservation.key, TRANSFER_FAILED, blocks_safe=blocks_safe)
    [output] = pair.generation.step()
    assert output.error == TRANSFER_FAILED.to_info()
    quarantined = 0 if blocks_safe else 3
    assert pair.generation.load().blocks == BlockCounts(free=16 - quarantined, quarantined=quarantined)
    pair.generation.check()
    for _ in range(2):
        pair.generation.release_quarantine(reservation.key)
        assert pair.generation.load().blocks == BlockCounts(free=16)


def test_a_deadline_during_a_transfer_cancels_it() -> None:
    """Like an abort, with the deadline's error."""
    now = 0.0
    engine = Engine(FakeRunner(), engine_config(), Role.GENERATION, clock=lambda: now)
    engine.add(handed_over(make_request(1, PROMPT, max_tokens=6, deadline_s=3.0), [5], blocks=3))
    engine.step()
    [reservation] = engine.take_reservations()
    assert is_idle(engine)
    now = 3.0
    assert not is_idle(engine)
    [output] = engine.step()
    assert output.error is not None
    assert output.error.kind is ErrorKind.DEADLINE
    assert engine.take_cancellations() == [reservation.key]
    assert is_idle(engine)


def test_while_all_wait_for_transfers_there_is_no_work() -> None:
    """The engine loop may sleep; the end of a transfer is work again."""
    engine = Engine(FakeRunner(num_blocks=4), engine_config(), Role.GENERATION)
    for client_id in (1, 2):
        engine.add(handed_over(make_request(client_id, PROMPT, max_tokens=5), [5], blocks=3))
    engine.step()
    [reservation] = engine.take_reservations()
    engine.step()
    assert is_idle(engine)
    engine.fail_reservation(reservation.key, TRANSFER_FAILED, blocks_safe=True)
    assert not is_idle(engine)
    engine.step()
    assert [one.key.client_id for one in engine.take_reservations()] == [2]
