"""Requests for several sequences through the router: one context phase, then each by itself, one entry for all."""

import pytest

from router.ledger import LedgerEntry, LedgerPhase
from tests.support.fake_cluster import FakeCluster, fake_cluster, router_config
from tests.support.fake_remote import RecordingSink
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError, TransferError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.tokens import pack_tokens, unpack_tokens


def tokens_of(sink: RecordingSink) -> list[int]:
    """All tokens that the client got."""
    return [token for output in sink.outputs for token in unpack_tokens(output.token_ids)]


def ended(cluster: FakeCluster) -> LedgerEntry:
    """The entry that ended last."""
    return next(iter(cluster.executor.ledger.ended_entries()))


def hand_over_all(cluster: FakeCluster) -> list[GenerationRequest]:
    """Let the context worker hand over every index, with first token 10 + index; returns what generation got."""
    context = cluster.context()
    for sequence in context.last.sequences():
        context.hand_over(sequence, token_id=10 + sequence.key.index, cached=2)
    return cluster.generation().requests


async def test_one_context_phase_then_a_generation_leg_for_each() -> None:
    """The request crosses once with `n`; each index is handed over with its own tokens, key and seed."""
    async with fake_cluster(generation=2) as cluster:
        client_id, sinks = cluster.send_all(3)
        context = cluster.context()
        assert [(one.n, one.phase) for one in context.requests] == [(3, Phase.CONTEXT_ONLY)]
        for sequence in context.last.sequences():
            context.hand_over(sequence, token_id=10 + sequence.key.index, cached=2)
        [generation] = [one for one in (cluster.generation(0), cluster.generation(1)) if one.requests]
        assert [(one.key.client_id, one.key.index, one.n) for one in generation.requests] == [
            (client_id, index, 1) for index in range(3)
        ]
        assert [one.generated_ids for one in generation.requests] == [pack_tokens([10 + index]) for index in range(3)]
        assert [one.sampling.seed for one in generation.requests] == [0, 1, 2]
        params = [one.context_phase_params for one in generation.requests]
        assert [one.handle.key.index for one in params if one is not None] == [0, 1, 2]
        context.leases.clear()
        for request in generation.requests:
            generation.finish(request, 1, 20 + request.key.index)
        assert [tokens_of(sink) for sink in sinks] == [[10 + index, 20 + index] for index in range(3)]
        assert [(sink.finals, sink.outputs[0].cached_tokens) for sink in sinks] == [(1, 2)] * 3
        assert context.aborts == generation.aborts == []
        entry = ended(cluster)
        assert [move.phase for move in entry.moves] == ["queued", "context", "handoff", "generation", "done"]
        assert (entry.n, entry.output_tokens, entry.cached_tokens) == (3, 6, 2)
        cluster.assert_clean()


async def test_an_aggregated_worker_gets_all_of_it() -> None:
    """One submission, a sink for each."""
    async with fake_cluster(context=0) as cluster:
        _, sinks = cluster.send_all(2)
        worker = cluster.generation()
        assert [(one.n, one.phase) for one in worker.requests] == [(2, Phase.FULL)]
        for sequence in worker.last.sequences():
            worker.tokens(sequence, 0, 5)
            worker.finish(sequence, 1, 6)
        assert [(tokens_of(sink), sink.finals) for sink in sinks] == [([5, 6], 1)] * 2
        cluster.assert_clean()


async def test_an_index_that_its_first_token_ended_is_not_handed_over() -> None:
    """The others are; the entry is done when the last of them is."""
    async with fake_cluster() as cluster:
        _, sinks = cluster.send_all(2)
        context, generation = cluster.context(), cluster.generation()
        first, second = context.last.sequences()
        context.finish(first, 0, 7)
        assert (sinks[0].finals, len(cluster.executor.ledger)) == (1, 1)
        context.hand_over(second)
        context.leases.clear()
        assert [one.key.index for one in generation.requests] == [1]
        generation.finish(generation.last, 1, 8)
        assert ended(cluster).phase is LedgerPhase.DONE
        cluster.assert_clean()


@pytest.mark.parametrize("phase", [LedgerPhase.CONTEXT, LedgerPhase.HANDOFF, LedgerPhase.GENERATION])
async def test_an_abort_of_one_index_leaves_the_others(phase: LedgerPhase) -> None:
    """Its worker and its lease are told; the rest goes on to its end."""
    async with fake_cluster() as cluster:
        client_id, sinks = cluster.send_all(2)
        context, generation = cluster.context(), cluster.generation()
        sequences = context.last.sequences()
        if phase is not LedgerPhase.CONTEXT:
            hand_over_all(cluster)
        if phase is LedgerPhase.GENERATION:
            context.leases.clear()
            for request in generation.requests:
                generation.tokens(request, 1, 20)
        cluster.executor.abort_request(client_id, 1)
        assert [sink.finals for sink in sinks] == [0, 1]
        assert [type(error) for error in sinks[1].errors] == [AbortedError]
        assert context.leases == ({(client_id, 0)} if phase is LedgerPhase.HANDOFF else set())
        if phase is LedgerPhase.CONTEXT:
            context.hand_over(sequences[0])
        context.leases.clear()
        offset = 2 if phase is LedgerPhase.GENERATION else 1
        generation.finish(generation.requests[0], offset, 21)
        assert [sink.finals for sink in sinks] == [1, 1]
        assert ended(cluster).phase is LedgerPhase.CANCELLED
        cluster.assert_clean()


async def test_a_complete_index_is_done_and_the_others_go_on() -> None:
    """A stop string ends one index; the request is done with the last."""
    async with fake_cluster() as cluster:
        client_id, sinks = cluster.send_all(2)
        requests = hand_over_all(cluster)
        cluster.executor.complete_request(client_id, 0)
        cluster.context().leases.clear()
        assert [sink.finals for sink in sinks] == [1, 0]
        cluster.generation().finish(requests[1], 1, 9)
        assert (ended(cluster).phase, ended(cluster).error) == (LedgerPhase.DONE, None)
        cluster.assert_clean()


async def test_an_abort_of_the_request_tells_each_worker_once() -> None:
    """All indexes end, and all leases."""
    async with fake_cluster() as cluster:
        client_id, sinks = cluster.send_all(3)
        hand_over_all(cluster)
        cluster.executor.abort_request(client_id)
        assert [sink.finals for sink in sinks] == [1, 1, 1]
        assert cluster.context().aborts == cluster.generation().aborts == [client_id]
        cluster.assert_clean()


async def test_one_index_that_fails_ends_all_with_its_error() -> None:
    """One entry, one error; nothing is left at the workers."""
    async with fake_cluster() as cluster:
        _, sinks = cluster.send_all(3)
        requests = hand_over_all(cluster)
        cluster.generation().fail(requests[1], TransferError("lost"))
        assert [[type(error) for error in sink.errors] for sink in sinks] == [[TransferError]] * 3
        assert (ended(cluster).phase, ended(cluster).error) == (LedgerPhase.FAILED, "lost")
        cluster.assert_clean()


@pytest.mark.parametrize("error", [OverloadedError("full"), None])
async def test_a_context_phase_that_fails_is_placed_again_as_a_whole(error: OverloadedError | None) -> None:
    """A refusal or a death comes for every index; the request moves once. An index given up before stays so."""
    async with fake_cluster(context=2) as cluster:
        client_id, sinks = cluster.send_all(3)
        first = next(one for one in (cluster.context(0), cluster.context(1)) if one.requests)
        second = next(one for one in (cluster.context(0), cluster.context(1)) if not one.requests)
        cluster.executor.abort_request(client_id, 1)
        if error is None:
            first.die()
        else:
            for sequence in first.last.sequences():
                first.fail(sequence, error)
        assert [(one.n, one.key.attempt) for one in second.requests] == [(3, 1)]
        assert [key.index for key in second.sinks] == [0, 2]
        for sequence in second.last.sequences():
            second.hand_over(sequence)
        second.leases.clear()
        for request in cluster.generation().requests:
            cluster.generation().finish(request, 1, 8)
        assert [(tokens_of(sink), sink.finals) for sink in sinks] == [([7, 8], 1), ([], 1), ([7, 8], 1)]
        assert ended(cluster).attempt == 1
        cluster.assert_clean()


async def test_a_generation_worker_that_refuses_an_index_is_passed_over_for_it() -> None:
    """The next worker takes that one; the others stay."""
    async with fake_cluster(generation=2) as cluster:
        _, sinks = cluster.send_all(2)
        context = cluster.context()
        for sequence in context.last.sequences():
            context.hand_over(sequence)
        planned = next(one for one in (cluster.generation(0), cluster.generation(1)) if one.requests)
        other = next(one for one in (cluster.generation(0), cluster.generation(1)) if not one.requests)
        planned.fail(planned.requests[1], OverloadedError("full"))
        assert [one.key.index for one in other.requests] == [1]
        context.leases.clear()
        planned.finish(planned.requests[0], 1, 8)
        other.finish(other.last, 1, 9, reason=FinishReason.LENGTH)
        assert [tokens_of(sink) for sink in sinks] == [[7, 8], [7, 9]]
        cluster.assert_clean()


async def test_a_death_after_the_first_token_of_one_is_not_retried() -> None:
    """Tokens that a client has are not made again."""
    async with fake_cluster(context=0, generation=2, router=router_config(max_attempts=3)) as cluster:
        _, sinks = cluster.send_all(2)
        worker = next(one for one in (cluster.generation(0), cluster.generation(1)) if one.requests)
        worker.tokens(worker.last.sequences()[1], 0, 5)
        worker.die()
        assert [[type(error) for error in sink.errors] for sink in sinks] == [[EngineDeadError]] * 2
        cluster.assert_clean()
