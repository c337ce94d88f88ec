"""Transfers over UCX between two processes, one of which is killed or stopped in the middle."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer.events import TransferOutcome
from kvtransfer.options import SharedMemory
from tests.support.processes import wait_until
from tests.support.transfer import CANARY, Worker, context_memory, expected_content, generation_memory
from tests.support.transfer_process import QUICK, TransferProcess
from twostroke.protocol.ids import SequenceKey

pytestmark = pytest.mark.cluster

BLOCKS, SIZE = 2048, 65536
"""128 MiB: more than the sockets between two processes hold, so that a signal hits in the middle."""
COUNT = 2000
REUSED = 0x55


@pytest.fixture
def generation() -> Iterator[Worker]:
    """A generation worker in this process."""
    worker = Worker(generation_memory(BLOCKS, SIZE), timeouts=QUICK)
    yield worker
    worker.close()


@pytest.fixture
def context() -> Iterator[Worker]:
    """A context worker in this process."""
    worker = Worker(context_memory(BLOCKS, SIZE), timeouts=QUICK)
    yield worker
    worker.close()


def fetch_many(worker: Worker, process: TransferProcess, transfer_id: int, count: int = COUNT) -> list[int]:
    """Start a large fetch from the context process, scattered; its target blocks."""
    handle = process.offer(transfer_id, list(range(count)))
    blocks = list(range(count - 1, -1, -1))
    worker.agent.fetch(transfer_id, handle, range(count), blocks, 20.0)
    return blocks


def some_arrived(worker: Worker, blocks: list[int]) -> bool:
    """Whether the first of the blocks is being written."""
    return bool((worker.memory[blocks[0]] != CANARY).any())


def check_next_transfer(worker: Worker, process: TransferProcess, transfer_id: int) -> None:
    """Another, small transfer arrives whole and touches nothing else."""
    worker.memory[:] = CANARY
    leased, positions, blocks = [5, 9, 10], [0, 2], [47, 11]
    handle = process.offer(transfer_id, leased)
    worker.agent.fetch(transfer_id, handle, positions, blocks, 10.0)
    assert worker.fetch_end(transfer_id).outcome is TransferOutcome.DONE
    worker.assert_only_written(expected_content(positions, leased, blocks))


def test_a_whole_cache_arrives_exactly(generation: Worker) -> None:
    """Two thousand scattered blocks between two processes, every byte of them, and canaries elsewhere."""
    with TransferProcess("context", BLOCKS, SIZE) as process:
        blocks = fetch_many(generation, process, 1)
        ended = generation.fetch_end(1, 20.0)
        assert (ended.outcome, ended.blocks_safe, ended.count) == (TransferOutcome.DONE, True, COUNT)
        assert process.expect("lease") == "1 done"
        generation.assert_only_written(expected_content(range(COUNT), range(COUNT), blocks))


def test_a_killed_context_worker_fails_the_fetch_and_frees_the_blocks(generation: Worker) -> None:
    """The generation worker stays alive, learns it, proves its blocks safe, and fetches from the next one."""
    with TransferProcess("context", BLOCKS, SIZE) as process:
        blocks = fetch_many(generation, process, 1)
        wait_until(lambda: some_arrived(generation, blocks), 10.0, "the first block being written")
        process.signal(signal.SIGKILL)
        ended = generation.fetch_end(1)
        assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
        generation.safe(1)
        assert generation.agent.counters().quarantined == 0
    with TransferProcess("context", BLOCKS, SIZE) as process:
        check_next_transfer(generation, process, 2)


def test_a_killed_generation_worker_ends_the_lease(context: Worker) -> None:
    """The context worker stays alive, gets its blocks back, and serves the next generation worker."""
    with TransferProcess("generation", BLOCKS, SIZE) as process:
        process.fetch(1, context.agent.offer(SequenceKey(1), range(COUNT), 30.0), COUNT)
        wait_until(lambda: context.agent.counters().bytes_written > SIZE * 100, 10.0, "writes")
        process.signal(signal.SIGKILL)
        assert context.lease_end(SequenceKey(1)).outcome is TransferOutcome.FAILED
    with TransferProcess("generation", BLOCKS, SIZE) as process:
        process.fetch(1, context.agent.offer(SequenceKey(2), range(COUNT), 30.0), COUNT)
        assert process.expect("fetch") == f"1 done True {COUNT}"
        assert context.lease_end(SequenceKey(2)).outcome is TransferOutcome.DONE


def test_a_stopped_context_worker_cannot_write_after_it_wakes() -> None:
    """Blocks that were freed and used again keep their new content when the writer is continued."""
    count, size = 64, 2 << 20  # large blocks: the stopped writer always has writes under way
    generation = Worker(generation_memory(count, size), timeouts=QUICK)
    with TransferProcess("context", count, size) as process:
        blocks = fetch_many(generation, process, 1, count)
        wait_until(lambda: some_arrived(generation, blocks), 10.0, "the first block being written")
        process.signal(signal.SIGSTOP)
        ended = generation.fetch_end(1)
        assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
        assert "silent" in ended.reason
        generation.safe(1)
        generation.memory[:] = REUSED
        process.signal(signal.SIGCONT)
        assert process.expect("lease").split()[1] in ("failed", "cancelled")
        assert np.all(generation.memory == REUSED), "a block was written after it was declared safe"
        check_next_transfer(generation, process, 2)
    generation.close()


def test_a_stopped_generation_worker_releases_the_lease_and_never_sees_done(context: Worker) -> None:
    """The context worker breaks off by itself; the other, once continued, learns that the transfer failed."""
    with TransferProcess("generation", BLOCKS, SIZE) as process:
        process.fetch(1, context.agent.offer(SequenceKey(1), range(COUNT), 30.0), COUNT)
        wait_until(lambda: context.agent.counters().bytes_written > SIZE * 100, 10.0, "writes")
        process.signal(signal.SIGSTOP)
        assert context.lease_end(SequenceKey(1)).outcome is TransferOutcome.FAILED
        process.signal(signal.SIGCONT)
        assert process.expect("fetch") == "1 failed False 0"
        assert process.expect("safe") == "1"
        process.fetch(2, context.agent.offer(SequenceKey(2), range(COUNT), 30.0), COUNT)
        assert process.expect("fetch") == f"2 done True {COUNT}"


@pytest.mark.parametrize("transfers_before", [0, 1])
def test_over_shared_memory_only_the_writers_exit_frees_the_blocks(transfers_before: int) -> None:
    """A stopped writer may go on, so its target blocks stay in quarantine until its process is gone.

    The exit is seen even of a writer that never said a word to this worker.
    """
    worker = Worker(generation_memory(BLOCKS, SIZE), timeouts=QUICK, shared_memory=SharedMemory.CMA)
    with TransferProcess("context", BLOCKS, SIZE, SharedMemory.CMA) as process:
        for _ in range(transfers_before):
            check_next_transfer(worker, process, 1)
            assert process.expect("lease") == "1 done"
        handle = process.offer(2, [5, 6])
        process.signal(signal.SIGSTOP)
        worker.agent.fetch(2, handle, range(2), [1, 2], 20.0)
        ended = worker.fetch_end(2)
        assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
        assert worker.agent.counters().quarantined == 1
        process.signal(signal.SIGKILL)
        worker.safe(2)
    worker.close()


def test_over_shared_memory_a_writer_that_was_gone_before_holds_no_blocks() -> None:
    """Its pid is nobody's when the fetch begins, which is proof: the fetch fails at once, its blocks are free."""
    worker = Worker(generation_memory(BLOCKS, SIZE), timeouts=QUICK, shared_memory=SharedMemory.CMA)
    with TransferProcess("context", BLOCKS, SIZE, SharedMemory.CMA) as process:
        handle = process.offer(1, [5, 6])
    worker.agent.fetch(1, handle, range(2), [1, 2], 20.0)
    ended = worker.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, True)
    assert "exited" in ended.reason
    worker.close()
