"""The state machine of a sequence, and its block hashes."""

import itertools

import pytest

from tests.support.engine_requests import handed_over, make_request
from twostroke.engine.finish import FinishRules
from twostroke.engine.sequence import TRANSITIONS, Sequence, SequenceState
from twostroke.protocol.blockhash import hash_blocks, root_hash
from twostroke.protocol.requests import GenerationRequest, Phase


def sequence_of(request: GenerationRequest) -> Sequence:
    """A sequence for `request` that ends by nothing."""
    return Sequence(1, request, FinishRules(request.sampling, (), 99, 999), "digest")


@pytest.mark.parametrize(
    ("phase", "state"),
    [(Phase.FULL, SequenceState.WAITING), (Phase.CONTEXT_ONLY, SequenceState.WAITING)],
)
def test_a_sequence_starts_by_waiting(phase: Phase, state: SequenceState) -> None:
    """For blocks and a place in the batch."""
    assert sequence_of(make_request(1, [1], phase=phase)).state is state


def test_a_handed_over_sequence_starts_by_reserving() -> None:
    """Its K and V come from elsewhere: all positions before the first token."""
    sequence = sequence_of(handed_over(make_request(1, [1, 2, 3], generated=[4, 5]), [6], blocks=2))
    assert sequence.state is SequenceState.RESERVING
    assert (sequence.handed_over, sequence.received_tokens, len(sequence.token_ids)) == (5, 3, 6)


@pytest.mark.parametrize(("state", "to"), list(itertools.product(SequenceState, repeat=2)))
def test_only_the_transitions_of_the_table_are_possible(state: SequenceState, to: SequenceState) -> None:
    """Every pair of states."""
    sequence = sequence_of(make_request(1, [1]))
    sequence._state = state
    if to in TRANSITIONS[state]:
        sequence.move(to)
        assert sequence.state is to
    else:
        with pytest.raises(RuntimeError, match=f"from {state.value} to {to.value}"):
            sequence.move(to)


def test_every_state_can_end_and_none_follows() -> None:
    """No sequence can be stuck."""
    assert TRANSITIONS.keys() == set(SequenceState)
    assert all(SequenceState.ENDED in after for state, after in TRANSITIONS.items() if state is not SequenceState.ENDED)
    assert not TRANSITIONS[SequenceState.ENDED]


def test_block_hashes_are_those_of_the_protocol_and_grow_with_the_output() -> None:
    """Chained from the model's digest and the request's salt."""
    sequence = sequence_of(make_request(1, range(10), cache_salt="s"))
    root = root_hash("digest", "s")
    assert sequence.block_hashes(2, 4) == hash_blocks(root, list(range(8)), 4)
    with pytest.raises(ValueError, match="10 tokens do not fill 3 blocks of 4"):
        sequence.block_hashes(3, 4)
    sequence.token_ids += [10, 11]
    assert sequence.block_hashes(3, 4) == hash_blocks(root, list(range(12)), 4)
    assert sequence.block_hashes(1, 4) == hash_blocks(root, list(range(4)), 4)
