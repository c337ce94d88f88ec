"""A device that computes behind the engine's back: blocks leave once they are written, and are asked for once free."""

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer import agent
from kvtransfer.agent import TransferAgent
from kvtransfer.backend import BlockBuffer, MemoryKind
from kvtransfer.device import HostDevice
from kvtransfer.events import FetchEnded, LeaseEnded, TransferOutcome
from kvtransfer.loopback import LoopbackBackend, LoopbackFabric
from kvtransfer.options import BackendKind, TransferOptions, TransferTimeouts
from tests.support.fake_device import FakeDevice
from tests.support.transfer import (
    CANARY,
    LAYOUT,
    SECRET,
    Worker,
    block_bytes_of,
    buffer_of,
    context_memory,
    expected_content,
    generation_memory,
)
from twostroke.protocol.errors import EngineDeadError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import ProcessName

BLOCKS, SIZE = 64, 4096
KEY = SequenceKey(7, 0, 0)
STALE = 0x11
TIMEOUTS = TransferTimeouts(ping_s=0.1, silence_s=5.0, park_s=5.0, stop_s=5.0)


class DevicePair:
    """A context and a generation worker, each with a device of its own."""

    def __init__(self, kind: BackendKind) -> None:
        fabric = LoopbackFabric() if kind is BackendKind.LOOPBACK else None
        self.writer, self.reader = FakeDevice(), FakeDevice()
        self.context = Worker(
            np.full((BLOCKS, SIZE), STALE, np.uint8), fabric=fabric, timeouts=TIMEOUTS, device=self.writer
        )
        self.generation = Worker(generation_memory(BLOCKS, SIZE), fabric=fabric, timeouts=TIMEOUTS, device=self.reader)

    def compute(self, *blocks: int) -> None:
        """What the queued step does at last: write these blocks."""
        for block in blocks:
            self.context.memory[block] = block_bytes_of(block, SIZE)

    def written_bytes(self) -> int:
        """Bytes that the context worker has handed to its transport."""
        return self.context.agent.counters().bytes_written

    def close(self) -> None:
        """End both."""
        self.generation.close()
        self.context.close()


@pytest.fixture(params=list(BackendKind))
def pair(request: pytest.FixtureRequest) -> Iterator[DevicePair]:
    """The pair over each transport."""
    made = DevicePair(request.param)
    yield made
    made.close()


def _reserved_and_fenced(pair: DevicePair, deadline_s: float = 20.0) -> None:
    """A lease of blocks 3 and 4 that is reserved, and whose fence keeps it from being served."""
    handle = pair.context.agent.offer(KEY, [3, 4], 20.0)
    pair.generation.agent.fetch(1, handle, [0, 1], [8, 9], deadline_s)
    pair.reader.fences[0].pass_()
    pair.writer.fences[0].wait_until_asked()


def test_the_transfer_thread_enters_the_device_first(pair: DevicePair) -> None:
    """So that UCX finds it current."""
    assert pair.writer.threads == pair.reader.threads == ["kv-transfer"]


def test_no_block_is_sent_before_the_step_that_writes_it_has_ended(pair: DevicePair) -> None:
    """Until then nothing is handed to the transport; afterwards what the step wrote arrives, not what was there."""
    _reserved_and_fenced(pair)
    assert pair.context.agent.counters().operations == 0
    assert pair.context.agent.counters().leases_open == 1
    pair.generation.assert_only_written({})
    pair.compute(3, 4)
    pair.writer.fences[0].pass_()
    assert pair.generation.fetch_end(1) == FetchEnded(1, TransferOutcome.DONE, True, 2)
    assert pair.context.lease_end(KEY) == LeaseEnded(KEY, TransferOutcome.DONE)
    pair.generation.assert_only_written({8: 3, 9: 4})


def test_others_are_served_meanwhile(pair: DevicePair) -> None:
    """A fence holds its own lease back and no other."""
    _reserved_and_fenced(pair)
    pair.compute(20)
    other = pair.context.agent.offer(SequenceKey(8, 0, 0), [20], 20.0)
    pair.writer.fences[1].pass_()
    pair.generation.agent.fetch(2, other, [0], [0], 20.0)
    pair.reader.fences[1].pass_()
    assert pair.generation.fetch_end(2).outcome is TransferOutcome.DONE
    pair.generation.assert_only_written({0: 20})
    assert pair.written_bytes() == SIZE


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_a_transfer_given_up_while_it_waits_writes_nothing(pair: DevicePair, who: str) -> None:
    """Both sides agree; the fence that passes later changes nothing."""
    _reserved_and_fenced(pair)
    if who == "reader":
        pair.generation.agent.cancel(1)
    else:
        pair.context.agent.revoke(KEY)
    ended = pair.generation.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.CANCELLED, True)
    assert pair.context.lease_end(KEY) == LeaseEnded(KEY, TransferOutcome.CANCELLED)
    pair.writer.fences[0].pass_()
    assert pair.context.agent.counters().operations == 0
    pair.generation.assert_only_written({})


def test_a_step_that_does_not_end_in_time_expires_the_transfer(pair: DevicePair) -> None:
    """At the reader's deadline, on both sides, with nothing written."""
    _reserved_and_fenced(pair, deadline_s=0.3)
    assert pair.context.lease_end(KEY).outcome in {TransferOutcome.EXPIRED, TransferOutcome.CANCELLED}
    assert pair.generation.fetch_end(1).outcome is TransferOutcome.EXPIRED
    assert pair.context.agent.counters().operations == 0


def test_closing_does_not_wait_for_a_fence(pair: DevicePair) -> None:
    """The lease and the fetch end like all others."""
    _reserved_and_fenced(pair)
    pair.context.close()
    assert pair.context.lease_end(KEY).outcome is TransferOutcome.CANCELLED
    assert pair.generation.fetch_end(1).outcome is TransferOutcome.CANCELLED


def test_nobody_is_asked_to_write_before_the_reader_is_done_with_its_blocks(pair: DevicePair) -> None:
    """A step that is still queued may write into them for a sequence that has left."""
    pair.compute(3)
    handle = pair.context.agent.offer(KEY, [3], 20.0)
    pair.writer.fences[0].pass_()
    pair.generation.agent.fetch(1, handle, [0], [8], 20.0)
    pair.reader.fences[0].wait_until_asked()
    assert pair.generation.agent.counters().fetches_open == 1
    assert pair.context.agent.counters().operations == 0
    pair.generation.memory[8] = STALE
    pair.reader.fences[0].pass_()
    assert pair.generation.fetch_end(1).outcome is TransferOutcome.DONE
    pair.generation.assert_only_written({8: 3})


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_a_fetch_that_was_never_asked_for_leaves_its_blocks_safe(pair: DevicePair, end: str) -> None:
    """However it is given up; the lease stays for its own expiry."""
    handle = pair.context.agent.offer(KEY, [3], 20.0)
    pair.generation.agent.fetch(1, handle, [0], [8], 0.2 if end == "deadline" else 20.0)
    pair.reader.fences[0].wait_until_asked()
    if end == "cancel":
        pair.generation.agent.cancel(1)
    elif end == "close":
        pair.generation.close()
    ended = pair.generation.fetch_end(1)
    expected = TransferOutcome.EXPIRED if end == "deadline" else TransferOutcome.CANCELLED
    assert (ended.outcome, ended.blocks_safe) == (expected, True)
    counters = pair.generation.agent.counters()
    assert (counters.fetches_open, counters.fetches[expected]) == (0, 1)
    pair.context.wait(lambda _: pair.context.agent.counters().leases_open == 1)  # it may not have heard of it yet


def test_a_device_that_fails_ends_the_agent(pair: DevicePair) -> None:
    """Nothing is known of any block any more; the engine thread hears of it with its next call."""
    handle = pair.context.agent.offer(KEY, [3], 20.0)
    pair.writer.fences[0].broken = True
    pair.generation.agent.fetch(1, handle, [0], [8], 20.0)
    pair.reader.fences[0].pass_()
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        pair.context.wait(lambda _: False, timeout_s=20.0)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_where_writers_reach_in_a_closed_inlet_is_proof_against_other_hosts_alone(
    monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    """As over cuda_ipc: a writer that falls silent here may still write, until its process exits."""
    monkeypatch.setattr(LoopbackBackend, "close_is_proof", property(lambda _: False))
    if elsewhere:
        monkeypatch.setattr(agent, "this_process", lambda: ProcessName("00000000-0000-0000-0000-000000000000:1", 1))
    quick = TransferTimeouts(ping_s=0.1, silence_s=1.0, stop_s=0.3)
    fabric, writer = LoopbackFabric(), FakeDevice()
    context = Worker(context_memory(BLOCKS, SIZE), fabric=fabric, timeouts=quick, device=writer)
    generation = Worker(generation_memory(BLOCKS, SIZE), fabric=fabric, timeouts=quick)
    handle = context.agent.offer(KEY, [3], 20.0)
    generation.agent.fetch(1, handle, [0], [8], 20.0)
    writer.fences[0].wait_until_asked(200)  # pings are answered meanwhile
    writer.fences[0].broken = True  # the writer's thread ends, its process lives on
    ended = generation.fetch_end(1)
    assert (ended.outcome, ended.blocks_safe) == (TransferOutcome.FAILED, False)
    if elsewhere:
        generation.safe(1)
    else:
        with pytest.raises(AssertionError, match=r"not in 0\.7 s"):
            generation.safe(1, timeout_s=0.7)
    generation.close()
    context.close()


def test_memory_of_a_gpu_needs_its_device() -> None:
    """Else its blocks would be sent before they are written."""
    memory = context_memory(2, SIZE)
    host = buffer_of(memory)
    buffer = BlockBuffer(host.address, SIZE, 2, memory, MemoryKind.CUDA)
    with pytest.raises(ValueError, match="cuda memory needs the device"):
        TransferAgent(TransferOptions(SECRET), 1, LAYOUT, buffer, wake=lambda: None)


def test_fences_that_pass_in_any_order_among_cancels(pair: DevicePair) -> None:
    """Random: each transfer that is done brought what its step wrote, and nobody else's blocks were touched."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    count = 16
    leased = [rng.sample(range(4 * i, 4 * i + 4), rng.randint(1, 4)) for i in range(count)]
    waiting = []
    for i, blocks in enumerate(leased):
        handle = pair.context.agent.offer(SequenceKey(i, 0, 0), blocks, 30.0)
        positions = rng.sample(range(len(blocks)), rng.randint(1, len(blocks)))
        pair.generation.agent.fetch(i, handle, positions, [4 * i + n for n in range(len(positions))], 30.0)
        waiting += [("step", i), ("reader", i)]
        leased[i] = [blocks[position] for position in positions]
        pair.compute(*rng.sample(blocks, rng.randint(0, len(blocks))))  # part of the step has run already
    given_up = set(rng.sample(range(count), 5))
    waiting += [("cancel", i) for i in given_up]
    rng.shuffle(waiting)
    for what, i in waiting:
        time.sleep(rng.random() / 100)  # so that the transfer threads meet every mixture
        if what == "step":
            pair.compute(*range(4 * i, 4 * i + 4))
            pair.writer.fences[i].pass_()
        elif what == "reader":
            pair.reader.fences[i].pass_()
        else:
            pair.generation.agent.cancel(i)
    for i in range(count):
        ended = pair.generation.fetch_end(i, timeout_s=30.0)
        assert ended.blocks_safe
        assert ended.outcome is TransferOutcome.DONE or i in given_up
        if ended.outcome is TransferOutcome.DONE:
            blocks = [4 * i + n for n in range(len(leased[i]))]
            for block, source in expected_content(range(len(blocks)), leased[i], blocks).items():
                assert np.array_equal(pair.generation.memory[block], block_bytes_of(source, SIZE))
    asked = {4 * i + n for i in range(count) for n in range(len(leased[i]))}
    assert all((pair.generation.memory[block] == CANARY).all() for block in set(range(BLOCKS)) - asked)


def test_work_on_the_cpu_is_over_when_it_returns() -> None:
    """Its fence is always reached."""
    assert HostDevice().mark().reached()
