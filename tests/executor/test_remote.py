"""`RemoteExecutor` against a worker on a thread: attaching, serving, and each way to die."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scripted_worker import Act, ScriptedWorker, describe, expected_tokens, make_request
from tests.support.worker_thread import SECRET, worker_thread
from twostroke.executor.base import HealthState
from twostroke.executor.remote import RemoteExecutor, RemoteOptions
from twostroke.executor.result import GenerationResult
from twostroke.ipc.drops import DropReason
from twostroke.ipc.endpoint import EndpointOptions
from twostroke.ipc.sockets import QueueLimits
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError
from twostroke.protocol.ids import ClientIds, SequenceKey
from twostroke.protocol.requests import Abort
from twostroke.protocol.responses import ResponseBatch, SequenceOutput
from twostroke.protocol.worker import AttachRefused

DEADLINE_S = 5.0


async def until(met: Callable[[], bool]) -> None:
    """Wait until `met`; fails after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not met():  # noqa: ASYNC110 - what is waited for happens on the worker's thread
            await asyncio.sleep(0.01)


async def attach(worker: ScriptedWorker, frontend_id: int = 7, **options: float) -> RemoteExecutor:
    """Attach to a worker of the test."""
    return await RemoteExecutor.attach(
        worker.address,
        SECRET,
        ClientIds(frontend_id),
        options=RemoteOptions(**options),  # type: ignore[arg-type]
    )


def submit(executor: RemoteExecutor, prompt: list[int], max_tokens: int = 4) -> GenerationResult:
    """Submit a plain request."""
    return executor.submit(make_request(SequenceKey(executor.draw_client_id()), prompt, max_tokens))


async def error_of(result: GenerationResult) -> str:
    """The message of the `EngineDeadError` that `result` ends with."""
    with pytest.raises(EngineDeadError) as raised:
        await asyncio.wait_for(result.completion(), DEADLINE_S)
    return str(raised.value)


async def test_it_knows_the_worker_once_attached() -> None:
    """Epoch, description, model, health; load comes with the heartbeats."""
    with worker_thread() as worker:
        executor = await attach(worker)
        assert executor.epoch == worker.spec.epoch
        assert executor.description == describe(worker.spec, worker.address)
        assert executor.model.vocab_size == 1000
        assert executor.check_health().state is HealthState.READY
        submit(executor, [Act.HANG])
        running = submit(executor, [5], 2000)
        await until(lambda: executor.load.running == 1)
        assert executor.silence_s < DEADLINE_S
        running.abort()
        executor.shutdown()


async def test_requests_of_many_readers_are_answered_in_full() -> None:
    """A hundred at once, fifty tokens each, every token as foretold."""
    with worker_thread() as worker:
        executor = await attach(worker)
        results = [submit(executor, [number], 50) for number in range(100)]
        completions = await asyncio.gather(*(result.completion() for result in results))
        assert [c.token_ids for c in completions] == [expected_tokens([number], 50) for number in range(100)]
        assert executor.pending == 0
        assert executor.drops.total == 0
        assert worker.endpoint.drops.total == 0
        executor.shutdown()


async def test_two_frontends_share_a_worker() -> None:
    """Each gets its own; one's leaving does not disturb the other."""
    with worker_thread() as worker:
        one, two = await attach(worker, 1), await attach(worker, 2)
        leaving, staying = submit(one, [Act.HANG]), submit(two, [3], 200)
        one.shutdown()
        assert "left worker" in await error_of(leaving)
        assert (await staying.completion()).token_ids == expected_tokens([3], 200)
        two.shutdown()


async def test_an_abort_ends_the_result_at_once_and_reaches_the_worker() -> None:
    """Also for a request that nobody waits for any more: it may hold a lease."""
    with worker_thread() as worker:
        executor = await attach(worker)
        result = submit(executor, [Act.HANG])
        client_id = result.key.client_id
        result.abort()
        with pytest.raises(AbortedError):
            await result.completion()
        executor.abort_request(client_id, 3)
        await until(lambda: len(worker.aborts) == 2)
        assert worker.aborts == [Abort(client_id, 0), Abort(client_id, 3)]
        executor.shutdown()


async def test_an_abort_never_overtakes_its_request() -> None:
    """Both travel on one queue: whatever was aborted was submitted before, and nothing runs on."""
    with worker_thread() as worker:
        executor = await attach(worker)
        for number in range(50):
            submit(executor, [number], 100_000).abort()
        await until(lambda: len(worker.aborts) == 50)
        assert worker.submitted == 50
        assert worker.running == {}
        executor.shutdown()


async def test_outputs_for_unknown_sequences_and_other_epochs_are_dropped_and_counted() -> None:
    """Never an exception; what follows is taken."""
    with worker_thread() as worker:
        executor = await attach(worker)
        send = worker.endpoint.send
        worker.frozen.set()
        await until(worker.parked.is_set)  # the worker's thread leaves the endpoint to this one
        send(7, ResponseBatch(executor.epoch, [SequenceOutput(SequenceKey(7 << 48 | 9), 0)] * 2))
        send(7, ResponseBatch(executor.epoch + 1, [SequenceOutput(SequenceKey(7 << 48 | 9), 0)]))
        await until(lambda: executor.drops.total == 3)
        assert executor.drops[DropReason.UNKNOWN_KEY] == 2
        assert executor.drops[DropReason.WRONG_EPOCH] == 1
        worker.frozen.clear()
        assert (await submit(executor, [1]).completion()).token_ids == expected_tokens([1], 4)
        executor.shutdown()


async def test_a_foreign_client_id_is_refused_here() -> None:
    """The worker would drop it without an answer."""
    with worker_thread() as worker:
        executor = await attach(worker)
        with pytest.raises(ValueError, match="not drawn by this frontend"):
            executor.submit(make_request(SequenceKey(8 << 48 | 1), [1]))
        assert executor.pending == 0
        executor.shutdown()


async def test_another_thread_may_not_use_it() -> None:
    """It is bound to its loop's thread; a mistake is told, not suffered."""
    with worker_thread() as worker:
        executor = await attach(worker)
        with pytest.raises(RuntimeError, match="thread of its event loop"):
            await asyncio.to_thread(submit, executor, [1])
        executor.shutdown()


# --- attaching ---


async def test_another_secret_is_refused() -> None:
    """Soon, and with a hint."""
    with worker_thread() as worker:
        with pytest.raises(EngineDeadError, match="same secret file"):
            await RemoteExecutor.attach(worker.address, bytes(32), ClientIds(7))
        (await attach(worker)).shutdown()


async def test_a_port_where_nobody_listens_is_refused() -> None:
    """As soon as the connection is."""
    with pytest.raises(EngineDeadError, match=r"tcp://127\.0\.0\.1:9: the connection was refused"):
        await RemoteExecutor.attach("tcp://127.0.0.1:9", SECRET, ClientIds(7))


async def test_an_address_that_is_none_is_refused() -> None:
    """With the address."""
    with pytest.raises(EngineDeadError, match="cannot connect to worker 'nonsense'"):
        await RemoteExecutor.attach("nonsense", SECRET, ClientIds(7))


async def test_a_worker_that_does_not_answer_is_given_up() -> None:
    """The connection stands, but nobody reads."""
    with worker_thread() as worker:
        worker.frozen.set()
        await until(worker.parked.is_set)
        with pytest.raises(EngineDeadError, match=r"did not answer within 0\.3 s"):
            await attach(worker, attach_s=0.3)


async def test_a_taken_frontend_id_is_refused_with_the_workers_reason() -> None:
    """The holder goes on."""
    with worker_thread() as worker:
        holder = await attach(worker, 7)
        with pytest.raises(EngineDeadError, match="frontend id 7 is held"):
            await attach(worker, 7)
        assert (await submit(holder, [1]).completion()).token_ids == expected_tokens([1], 4)
        holder.shutdown()


async def test_after_leaving_the_id_is_free_again() -> None:
    """A frontend attaches anew with a fresh socket and the same id."""
    with worker_thread() as worker:
        first = await attach(worker, 7)
        first.shutdown()
        await until(lambda: worker.lost == [7])
        second = await attach(worker, 7)
        assert (await submit(second, [1]).completion()).token_ids == expected_tokens([1], 4)
        second.shutdown()


# --- dying ---


async def test_a_stopping_worker_fails_everything_pending_with_its_reason_once() -> None:
    """`on_dead` is called once; later submits raise; a second shutdown is no harm."""
    deaths: list[EngineDeadError] = []
    with worker_thread() as worker:
        executor = await RemoteExecutor.attach(worker.address, SECRET, ClientIds(7), on_dead=deaths.append)
        results = [submit(executor, [Act.HANG]) for _ in range(3)]
        worker.stop()
        for result in results:
            assert "was told to stop" in await error_of(result)
        assert [str(error) for error in deaths] == [executor.check_health().reason]
        assert executor.check_health().state is HealthState.DEAD
        with pytest.raises(EngineDeadError, match="was told to stop"):
            submit(executor, [1])
        executor.abort_request(7 << 48)
        executor.shutdown()
        assert len(deaths) == 1


async def test_a_silent_worker_is_dead() -> None:
    """The connection stands, heartbeats do not come."""
    deaths: list[EngineDeadError] = []
    with worker_thread() as worker:
        executor = await RemoteExecutor.attach(
            worker.address, SECRET, ClientIds(7), on_dead=deaths.append, options=RemoteOptions(dead_after_s=0.8)
        )
        result = submit(executor, [Act.HANG])
        await until(lambda: worker.submitted == 1)
        worker.frozen.set()
        assert "was silent for" in await error_of(result)
        assert len(deaths) == 1


async def test_a_pause_of_the_loop_is_no_silence_of_the_worker() -> None:
    """A blocked loop finds the heartbeats that came meanwhile; if the host paused, they come only after it."""
    with worker_thread() as worker:
        executor = await attach(worker, dead_after_s=1.6)
        await until(lambda: executor.silence_s < 0.2)
        worker.frozen.set()
        await until(worker.parked.is_set)
        threading.Event().wait(2.0)  # blocks the loop on purpose
        await asyncio.sleep(0.6)  # two looks
        assert executor.check_health().state is HealthState.READY
        worker.frozen.clear()
        await until(lambda: executor.silence_s < 0.2)
        executor.shutdown()


async def test_a_frontend_that_the_worker_lost_hears_of_it() -> None:
    """Its beats stopped reaching the worker for a while; the next one is answered, and everything pending fails."""
    with worker_thread(EndpointOptions(silent_after_s=0.3)) as worker:
        executor = await attach(worker, beat_s=1.0)
        result = submit(executor, [Act.HANG])
        assert "not attached" in await error_of(result)
        assert worker.lost == [7]


async def test_a_full_queue_refuses_requests_and_keeps_aborts() -> None:
    """Nothing blocks; refused requests leave no entry; the aborts arrive once the worker reads again."""
    limits = QueueLimits(messages=32)
    with worker_thread(EndpointOptions(limits=limits)) as worker:
        executor = await RemoteExecutor.attach(
            worker.address, SECRET, ClientIds(7), options=RemoteOptions(limits=limits, dead_after_s=60.0)
        )
        worker.frozen.set()
        await until(worker.parked.is_set)
        padding = [Act.HANG, *[1] * 100_000]
        accepted: list[GenerationResult] = []
        refused_in_a_row = 0
        # A refusal is not the last word: ZMQ still moves what waits into its own queues and the kernel's.
        async with asyncio.timeout(2 * DEADLINE_S):
            while refused_in_a_row < 10:
                try:
                    accepted.append(submit(executor, padding))
                except OverloadedError:
                    refused_in_a_row += 1
                    await asyncio.sleep(0.02)
                else:
                    refused_in_a_row = 0
                    await asyncio.sleep(0)  # each turn of the loop sends what it was given
        with pytest.raises(OverloadedError, match="try again later"):
            submit(executor, padding)
        assert executor.pending == len(accepted)
        accepted[0].abort()
        with pytest.raises(AbortedError):
            await accepted[0].completion()
        worker.frozen.clear()
        await until(lambda: worker.aborts == [Abort(accepted[0].key.client_id, 0)])
        assert worker.submitted == len(accepted)
        executor.shutdown()
        # libzmq 4.3.5 aborts if a worker closes a connection whose messages it has stopped reading (libzmq #4841).
        await until(lambda: worker.lost == [7])


async def test_what_is_submitted_together_travels_together_and_in_order() -> None:
    """One bundle a turn of the loop, aborts behind their requests; a burst beyond the bound is refused."""
    limits = QueueLimits(messages=32)
    with worker_thread(EndpointOptions(limits=limits)) as worker:
        executor = await RemoteExecutor.attach(
            worker.address, SECRET, ClientIds(7), options=RemoteOptions(limits=limits, dead_after_s=60.0)
        )
        results = [submit(executor, [Act.HANG]) for _ in range(31)]
        results[3].abort()
        with pytest.raises(OverloadedError, match="32 messages wait"):
            submit(executor, [Act.HANG])
        await until(lambda: worker.aborts == [Abort(results[3].key.client_id, 0)])
        assert worker.submitted == 31
        assert executor.pending == 30
        executor.shutdown()


async def test_a_bug_in_a_sink_ends_the_executor_loudly() -> None:
    """Never a loop callback that dies silently while readers wait."""

    class Broken(GenerationResult):
        def feed(self, output: SequenceOutput) -> None:
            raise ZeroDivisionError(str(output.offset))

    with worker_thread() as worker:
        executor = await attach(worker)
        waiting = submit(executor, [Act.HANG])
        request = make_request(SequenceKey(executor.draw_client_id()), [1])
        executor.submit_to(request, Broken(request, lambda: None))
        assert "broke: ZeroDivisionError" in await error_of(waiting)


async def test_a_refusal_after_attaching_is_the_end() -> None:
    """Whatever the worker's reason."""
    with worker_thread() as worker:
        executor = await attach(worker)
        result = submit(executor, [Act.HANG])
        executor._handle(AttachRefused(1, executor.epoch, "out of frontends"))
        assert "out of frontends" in await error_of(result)


async def test_a_storm_of_submits_and_aborts_leaves_nothing_behind() -> None:
    """Every result has an end: all its tokens, or `AbortedError`; nothing is pending or running afterwards."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with worker_thread() as worker:
        executor = await attach(worker)

        async def client() -> int:
            complete = 0
            for _ in range(20):
                prompt, count = [dice.randrange(800)], dice.randrange(1, 30)
                result = submit(executor, prompt, count)
                if dice.random() < 0.5:
                    await asyncio.sleep(dice.random() * 0.02)
                    result.abort()
                try:
                    completion = await asyncio.wait_for(result.completion(), DEADLINE_S)
                except AbortedError:
                    continue
                assert completion.token_ids == expected_tokens(prompt, count)
                complete += 1
            return complete

        complete = await asyncio.gather(*(client() for _ in range(20)))
        assert sum(complete) > 0
        assert executor.pending == 0
        await until(lambda: worker.running == {})
        assert worker.endpoint.drops.total == 0
        executor.shutdown()


async def test_no_descriptor_is_left_after_attaching_and_leaving() -> None:
    """Ten times, in good ways and bad."""

    async def once() -> None:
        with worker_thread() as worker:
            executor = await attach(worker)
            await submit(executor, [1]).completion()
            with pytest.raises(EngineDeadError):
                await RemoteExecutor.attach(worker.address, bytes(32), ClientIds(8))
            executor.shutdown()
            await until(lambda: worker.lost == [7])

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await once()
    await asyncio.sleep(0.7)  # a leaving socket lingers for half a second
    before = descriptors()
    for _ in range(3):
        await once()
    await until(lambda: descriptors() <= before)
