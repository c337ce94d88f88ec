"""One request through the router, event by event, over fake workers."""

import asyncio

import pytest

from router.ledger import LedgerPhase
from tests.support.fake_cluster import FakeCluster, fake_cluster, router_config, until
from tests.support.fake_remote import RecordingSink
from twostroke.protocol.errors import (
    AbortedError,
    DeadlineError,
    EngineDeadError,
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    TransferError,
)
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import pack_tokens, unpack_tokens
from twostroke.protocol.worker import WorkerLoad


def tokens_of(sink: RecordingSink) -> list[int]:
    """All tokens that the client got."""
    return [token for output in sink.outputs for token in unpack_tokens(output.token_ids)]


def ended_phase(cluster: FakeCluster) -> LedgerPhase:
    """How the request that ended last did."""
    return next(iter(cluster.executor.ledger.ended_entries())).phase


async def test_happy_path() -> None:
    """Context leg, first token to the client, generation leg with that token, one final output."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        context, generation = cluster.context(), cluster.generation()
        assert (context.last.phase, context.last.key.client_id) == (Phase.CONTEXT_ONLY, client_id)
        assert generation.requests == []
        context.hand_over(context.last, token_id=7, cached=3)
        assert tokens_of(sink) == [7]
        assert sink.outputs[0].finish_reason is None
        assert sink.outputs[0].context_phase_params is None
        taken_over = generation.last
        assert (taken_over.phase, taken_over.generated_ids) == (Phase.GENERATION_ONLY, pack_tokens([7]))
        assert taken_over.context_phase_params is not None
        assert taken_over.context_phase_params.handle.key == context.last.key
        generation.tokens(taken_over, 1, 8, cached=99)
        context.leases.clear()  # its transfer is done
        generation.finish(taken_over, 2, 9)
        assert tokens_of(sink) == [7, 8, 9]
        assert [output.cached_tokens for output in sink.outputs] == [3, None, None]
        assert (sink.finals, sink.outputs[-1].finish_reason) == (1, FinishReason.STOP)
        assert context.aborts == generation.aborts == []
        entry = next(iter(cluster.executor.ledger.ended_entries()))
        assert [move.phase for move in entry.moves] == ["queued", "context", "handoff", "generation", "done"]
        assert (entry.output_tokens, entry.cached_tokens, entry.attempt) == (3, 3, 0)
        assert (entry.context_worker, entry.generation_worker) == ("tcp://context:1", "tcp://generation:1")
        cluster.assert_clean()


async def test_result_of_a_submitted_request() -> None:
    """A reader that awaits is woken by both roles' outputs."""
    async with fake_cluster() as cluster:
        result = cluster.executor.submit(cluster.request())
        reader = asyncio.create_task(result.completion())
        await asyncio.sleep(0)
        cluster.context().hand_over(cluster.context().last, token_id=7, cached=2)
        await asyncio.sleep(0)
        cluster.context().leases.clear()
        cluster.generation().finish(cluster.generation().last, 1, 8, 9, reason=FinishReason.LENGTH)
        completion = await asyncio.wait_for(reader, 5)
        assert (completion.token_ids, completion.finish_reason) == ([7, 8, 9], FinishReason.LENGTH)
        assert completion.cached_tokens == 2


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_first_token_ends_the_request(reason: FinishReason) -> None:
    """A generation worker never hears of a request that its first token ended."""
    async with fake_cluster() as cluster:
        _, sink = cluster.send()
        cluster.context().finish(cluster.context().last, 0, 7, reason=reason)
        assert (tokens_of(sink), sink.finals) == ([7], 1)
        assert cluster.generation().requests == []
        assert ended_phase(cluster) is LedgerPhase.DONE
        cluster.assert_clean()


async def test_aggregated_worker_gets_the_whole_request() -> None:
    """Without context workers one full leg serves the request; its first token moves the ledger to generation."""
    async with fake_cluster(context=0) as cluster:
        _, sink = cluster.send()
        worker = cluster.generation()
        assert worker.last.phase is Phase.FULL
        worker.tokens(worker.last, 0, 5, cached=2)
        worker.finish(worker.last, 1, 6)
        assert (tokens_of(sink), sink.finals, sink.outputs[0].cached_tokens) == ([5, 6], 1, 2)
        entry = next(iter(cluster.executor.ledger.ended_entries()))
        assert [move.phase for move in entry.moves] == ["queued", "context", "generation", "done"]
        assert (entry.context_worker, entry.generation_worker) == (None, "tcp://generation:1")
        cluster.assert_clean()


async def test_context_worker_dies_before_the_first_token() -> None:
    """The context phase runs again elsewhere, under the next attempt number."""
    async with fake_cluster(context=2) as cluster:
        _, sink = cluster.send()
        first, second = cluster.context(0), cluster.context(1)
        if not first.requests:
            first, second = second, first
        first.die()
        assert sink.finals == 0
        assert second.last.key.attempt == 1
        second.hand_over(second.last)
        second.leases.clear()
        assert cluster.generation().last.key.attempt == 1
        cluster.generation().finish(cluster.generation().last, 1, 8)
        assert (tokens_of(sink), sink.finals) == ([7, 8], 1)
        entry = next(iter(cluster.executor.ledger.ended_entries()))
        assert [move.phase for move in entry.moves][:4] == ["queued", "context", "queued", "context"]
        assert entry.attempt == 1


async def test_refusal_is_tried_elsewhere_once_each() -> None:
    """Overloaded workers are asked once; when all have refused, the client hears of it."""
    async with fake_cluster(context=2) as cluster:
        _, sink = cluster.send()
        for _ in range(2):
            worker = next(worker for worker in (cluster.context(0), cluster.context(1)) if worker.sinks)
            worker.fail(worker.last, OverloadedError("full"))
        assert [len(cluster.context(n).requests) for n in range(2)] == [1, 1]
        assert [type(error) for error in sink.errors] == [OverloadedError]
        cluster.assert_clean()


async def test_attempts_are_capped() -> None:
    """A request that kills every worker it meets stops after `max_attempts`."""
    async with fake_cluster(context=4, router=router_config(max_attempts=2)) as cluster:
        _, sink = cluster.send()
        for _ in range(2):
            next(worker for worker in cluster.workers.values() if worker.sinks).die()
        assert [type(error) for error in sink.errors] == [EngineDeadError]
        assert sum(len(worker.requests) for worker in cluster.workers.values()) == 2


async def test_refusal_at_submission_moves_on() -> None:
    """A worker whose queue is full raises at once; the next one is taken, in either role."""
    async with fake_cluster(context=2, generation=2) as cluster:
        cluster.context(0).refusal = cluster.generation(0).refusal = OverloadedError("queue full")
        _, sink = cluster.send()
        cluster.context(1).hand_over(cluster.context(1).last)
        assert cluster.context(1).aborts == []
        cluster.context(1).leases.clear()
        cluster.generation(1).finish(cluster.generation(1).last, 1, 8)
        assert (tokens_of(sink), sink.finals) == ([7, 8], 1)
        cluster.assert_clean()


async def test_no_generation_worker_takes_over() -> None:
    """The client gets one clear error after its first token, and the lease is ended."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        cluster.generation().refusal = OverloadedError("queue full")
        cluster.context().hand_over(cluster.context().last)
        assert (tokens_of(sink), [type(error) for error in sink.errors]) == ([7], [TransferError])
        assert cluster.context().aborts == [client_id]
        assert ended_phase(cluster) is LedgerPhase.FAILED
        cluster.assert_clean()


async def test_generation_worker_refuses_after_submission() -> None:
    """An answer of OverloadedError before any generated token: another generation worker takes the same lease."""
    async with fake_cluster(generation=2) as cluster:
        _, sink = cluster.send()
        cluster.context().hand_over(cluster.context().last)
        first = next(worker for worker in (cluster.generation(0), cluster.generation(1)) if worker.sinks)
        first.fail(first.last, OverloadedError("full"))
        second = next(worker for worker in (cluster.generation(0), cluster.generation(1)) if worker.sinks)
        assert second is not first
        cluster.context().leases.clear()
        second.finish(second.last, 1, 8)
        assert (tokens_of(sink), sink.finals) == ([7, 8], 1)
        cluster.assert_clean()


async def test_planned_generation_worker_died_meanwhile() -> None:
    """A generation worker that died during the context phase is not handed over to."""
    async with fake_cluster(generation=2) as cluster:
        _, sink = cluster.send()
        planned = next(iter(cluster.executor.ledger.open_entries())).generation_worker
        cluster.workers[str(planned)].die()
        cluster.context().hand_over(cluster.context().last)
        survivor = next(worker for worker in (cluster.generation(0), cluster.generation(1)) if worker.dead is None)
        assert survivor.last.phase is Phase.GENERATION_ONLY
        survivor.finish(survivor.last, 1, 8)
        assert sink.finals == 1


@pytest.mark.parametrize("generated", [0, 1])
async def test_generation_worker_dies(generated: int) -> None:
    """One clear error, in the transfer and in the middle of the stream; before the first token the lease is ended."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        cluster.context().hand_over(cluster.context().last)
        if generated:
            cluster.generation().tokens(cluster.generation().last, 1, 8)
            cluster.context().leases.clear()
        cluster.generation().die("killed by signal 9")
        assert [str(error) for error in sink.errors] == ["killed by signal 9"]
        assert sink.finals == 1
        assert cluster.context().aborts == ([] if generated else [client_id])
        assert len(cluster.executor.ledger) == 0


async def test_transfer_fails() -> None:
    """The generation worker says that the KV cache did not come: the client hears it, the lease is ended."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        cluster.context().hand_over(cluster.context().last)
        cluster.generation().fail(cluster.generation().last, TransferError("context worker is gone"))
        assert [str(error) for error in sink.errors] == ["context worker is gone"]
        assert cluster.context().aborts == [client_id]
        cluster.assert_clean()


async def test_bad_request_is_not_retried() -> None:
    """An error that every worker would answer goes to the client at once."""
    async with fake_cluster(context=2) as cluster:
        _, sink = cluster.send()
        worker = next(worker for worker in (cluster.context(0), cluster.context(1)) if worker.sinks)
        worker.fail(worker.last, InvalidRequestError("prompt too long", "prompt"))
        assert [(type(error), getattr(error, "param", None)) for error in sink.errors] == [
            (InvalidRequestError, "prompt")
        ]
        cluster.assert_clean()


@pytest.mark.parametrize("phase", [LedgerPhase.CONTEXT, LedgerPhase.HANDOFF, LedgerPhase.GENERATION])
async def test_client_leaves(phase: LedgerPhase) -> None:
    """An abort in prefill, transfer or decode ends what is under way at each role, and nothing late gets through."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        context, generation = cluster.context(), cluster.generation()
        if phase is not LedgerPhase.CONTEXT:
            context.hand_over(context.last)
        if phase is LedgerPhase.GENERATION:
            context.leases.clear()
            generation.tokens(generation.last, 1, 8)
        assert next(iter(cluster.executor.ledger.open_entries())).phase is phase
        late = dict(generation.sinks or context.sinks)
        cluster.executor.abort_request(client_id)
        cluster.executor.abort_request(client_id)
        for key, leg in late.items():
            leg.feed(SequenceOutput(key, 1, pack_tokens([5]), finish_reason=FinishReason.STOP))
        assert [type(error) for error in sink.errors] == [AbortedError]
        assert sink.finals == 1
        assert context.aborts == ([] if phase is LedgerPhase.GENERATION else [client_id])
        assert generation.aborts == ([] if phase is LedgerPhase.CONTEXT else [client_id])
        assert ended_phase(cluster) is LedgerPhase.CANCELLED
        cluster.assert_clean()


@pytest.mark.parametrize("phase", list(LedgerPhase)[:4])
async def test_deadline(phase: LedgerPhase) -> None:
    """The time is up in each open phase: DeadlineError, everything aborted."""
    async with fake_cluster() as cluster:
        context, generation = cluster.context(), cluster.generation()
        if phase is LedgerPhase.QUEUED:
            context.load = WorkerLoad(admitting=False)
        _, sink = cluster.send(deadline_s=0.05)
        if phase in (LedgerPhase.HANDOFF, LedgerPhase.GENERATION):
            context.hand_over(context.last)
        if phase is LedgerPhase.GENERATION:
            context.leases.clear()
            generation.tokens(generation.last, 1, 8)
        await until(lambda: bool(sink.finals))
        assert [type(error) for error in sink.errors] == [DeadlineError]
        assert str(phase) in str(sink.errors[0])
        cluster.assert_clean()


async def test_deadline_travels_to_both_roles() -> None:
    """Workers get what is left of the request's time, at most the router's own limit."""
    async with fake_cluster(router=router_config(request_timeout_s=20.0)) as cluster:
        cluster.send(deadline_s=10.0)
        cluster.context().hand_over(cluster.context().last)
        for request in (cluster.context().last, cluster.generation().last):
            assert request.deadline_s is not None
            assert 9.0 < request.deadline_s <= 10.0
        cluster.send(deadline_s=1000.0)
        limit_s = cluster.context().last.deadline_s
        assert limit_s is not None
        assert 19.0 < limit_s <= 20.0


async def test_repeats_are_dropped() -> None:
    """A message that comes twice changes nothing."""
    async with fake_cluster() as cluster:
        _, sink = cluster.send()
        cluster.context().hand_over(cluster.context().last)
        cluster.context().leases.clear()
        generation = cluster.generation()
        for _ in range(2):
            generation.tokens(generation.last, 1, 8)
        generation.finish(generation.last, 2, 9)
        assert (tokens_of(sink), sink.finals) == ([7, 8, 9], 1)
        cluster.assert_clean()


async def test_lost_tokens_fail_the_request() -> None:
    """A gap in the offsets is an error, never a hole in the text; both roles are cleaned up."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        cluster.context().hand_over(cluster.context().last)
        cluster.generation().tokens(cluster.generation().last, 2, 9)
        assert [type(error) for error in sink.errors] == [InternalRequestError]
        assert cluster.generation().aborts == [client_id]
        assert tokens_of(sink) == [7]
        cluster.assert_clean()


async def test_broken_hand_over() -> None:
    """A hand-over without parameters, or with other first tokens, fails that request alone and ends its lease."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        context = cluster.context()
        context.leases.add((client_id, 0))
        context.answer(SequenceOutput(context.last.key, 0, pack_tokens([7]), finish_reason=FinishReason.HANDOVER))
        assert [type(error) for error in sink.errors] == [InternalRequestError]
        assert cluster.generation().requests == []
        cluster.assert_clean()


@pytest.mark.parametrize("phase", [LedgerPhase.HANDOFF, LedgerPhase.GENERATION])
async def test_a_complete_request_is_done(phase: LedgerPhase) -> None:
    """A stop string was found, in the first token or later: workers are told as by an abort, the ledger says done."""
    async with fake_cluster() as cluster:
        client_id, sink = cluster.send()
        context, generation = cluster.context(), cluster.generation()
        context.hand_over(context.last)
        if phase is LedgerPhase.GENERATION:
            context.leases.clear()
            generation.tokens(generation.last, 1, 8)
        cluster.executor.complete_request(client_id)
        cluster.executor.complete_request(client_id)
        assert (sink.finals, [type(error) for error in sink.errors]) == (1, [AbortedError])
        assert context.aborts == ([client_id] if phase is LedgerPhase.HANDOFF else [])
        assert generation.aborts == [client_id]
        entry = next(iter(cluster.executor.ledger.ended_entries()))
        assert (entry.phase, entry.error) == (LedgerPhase.DONE, None)
        cluster.assert_clean()


async def test_client_leaves_on_its_first_token() -> None:
    """A sink that aborts while it is fed: the lease is ended, no generation worker is asked."""
    async with fake_cluster() as cluster:
        request = cluster.request()

        class Leaver(RecordingSink):
            """Aborts on the first output."""

            def feed(self, output: SequenceOutput) -> None:
                """Take it and leave."""
                super().feed(output)
                cluster.executor.abort_request(request.key.client_id)

        sink = Leaver()
        cluster.executor.submit_to(request, sink)
        cluster.context().hand_over(cluster.context().last)
        assert (sink.finals, cluster.generation().requests) == (1, [])
        cluster.assert_clean()


async def test_unexpected_exception_of_a_link_ends_one_request() -> None:
    """A bug in the link harms the request that met it, with a final event."""
    async with fake_cluster() as cluster:

        def explode(*_: object) -> None:
            raise RuntimeError("bug")

        cluster.context().on_submit = explode
        _, sink = cluster.send()
        assert [type(error) for error in sink.errors] == [InternalRequestError]
        assert len(cluster.executor.ledger) == 0
