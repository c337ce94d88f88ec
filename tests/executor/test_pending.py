"""Registration comes first, every sink has exactly one end, loops are woken once a batch."""

import asyncio
import random
import threading
from collections import Counter

import pytest

from twostroke.executor.pending import PendingResults
from twostroke.protocol.errors import AbortedError, EngineDeadError, OverloadedError, TwostrokeError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.responses import FinishReason, SequenceOutput


class Sink:
    """Records what it gets."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.outputs: list[SequenceOutput] = []
        self.errors: list[TwostrokeError] = []
        self.wakes = 0

    def feed(self, output: SequenceOutput) -> None:
        """Record."""
        self.outputs.append(output)

    def fail(self, error: TwostrokeError) -> None:
        """Record."""
        self.errors.append(error)

    def wake(self) -> None:
        """Count."""
        self.wakes += 1


def sent() -> None:
    """Sending that works."""


def part(key: SequenceKey, *, final: bool = False) -> SequenceOutput:
    """One output."""
    return SequenceOutput(key, 0, b"\x01\x00\x00\x00", finish_reason=FinishReason.LENGTH if final else None)


def test_a_sink_is_registered_before_its_request_is_sent() -> None:
    """An answer that comes before `send` returns finds its sink."""
    pending, sink, key = PendingResults(), Sink(), SequenceKey(1)

    def answer_at_once() -> None:
        pending.deliver([part(key, final=True)])

    pending.submit({key: sink}, answer_at_once)
    assert len(sink.outputs) == 1
    assert len(pending) == 0


def test_the_entry_leaves_when_sending_fails() -> None:
    """The caller gets the error, the sink gets nothing."""
    pending, sink = PendingResults(), Sink()

    def refuse() -> None:
        raise OverloadedError("full")

    with pytest.raises(OverloadedError, match="full"):
        pending.submit({SequenceKey(1): sink}, refuse)
    assert (len(pending), sink.outputs, sink.errors) == (0, [], [])
    pending.submit({SequenceKey(1): sink}, sent)
    assert len(pending) == 1


def test_the_sequences_of_one_request_are_registered_together() -> None:
    """All of them before it is sent; none if one of the keys is taken, or if sending fails."""
    pending, first, second = PendingResults(), Sink(), Sink()
    keys = [SequenceKey(1, index) for index in range(2)]

    def answer_both() -> None:
        pending.deliver([part(key, final=True) for key in keys])

    pending.submit(dict(zip(keys, (first, second), strict=True)), answer_both)
    assert (len(first.outputs), len(second.outputs), len(pending)) == (1, 1, 0)
    pending.submit({keys[1]: second}, sent)
    with pytest.raises(ValueError, match="/1/0 is pending already"):
        pending.submit(dict.fromkeys(keys, first), sent)
    assert len(pending) == 1


def test_nothing_is_registered_with_a_dead_executor() -> None:
    """The check before registering."""
    pending, sink = PendingResults(), Sink()
    pending.fail_all(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        pending.submit({SequenceKey(1): sink}, lambda: pytest.fail("sent to a dead executor"))
    assert (len(pending), sink.errors) == (0, [])


def test_death_while_sending_ends_the_sink_once() -> None:
    """The check after registering: the sink was told already, so the caller is not told again."""
    pending, sink = PendingResults(), Sink()

    def die() -> None:
        pending.fail_all(EngineDeadError("gone"))
        pending.require_alive()

    pending.submit({SequenceKey(1): sink}, die)
    assert [str(error) for error in sink.errors] == ["gone"]


def test_a_key_is_registered_once() -> None:
    """A retry needs another attempt number."""
    pending = PendingResults()
    pending.submit({SequenceKey(1): Sink()}, sent)
    with pytest.raises(ValueError, match="pending already"):
        pending.submit({SequenceKey(1): Sink()}, sent)
    pending.submit({SequenceKey(1, attempt=1): Sink()}, sent)
    assert len(pending) == 2


def test_outputs_find_their_sinks_and_unknown_ones_are_counted() -> None:
    """A final output ends the entry, so that what follows is unknown."""
    pending, sink, key = PendingResults(), Sink(), SequenceKey(1)
    pending.submit({key: sink}, sent)
    batch = [part(key), part(SequenceKey(2)), part(key, final=True), part(key)]
    assert pending.deliver(batch) == 2
    assert len(sink.outputs) == 2
    assert len(pending) == 0


def test_an_abort_ends_one_index_or_all() -> None:
    """With `AbortedError`; other requests go on."""
    pending = PendingResults()
    sinks = {index: Sink() for index in range(3)}
    other = Sink()
    for index, sink in sinks.items():
        pending.submit({SequenceKey(1, index): sink}, sent)
    pending.submit({SequenceKey(2): other}, sent)
    pending.abort(1, 1)
    assert [len(sink.errors) for sink in sinks.values()] == [0, 1, 0]
    pending.abort(1, None)
    assert [len(sink.errors) for sink in sinks.values()] == [1, 1, 1]
    assert all(isinstance(error, AbortedError) for sink in sinks.values() for error in sink.errors)
    pending.abort(1, None)
    assert pending.client_ids() == [2]
    assert other.errors == []


def test_the_first_fatal_error_wins_and_reaches_everyone() -> None:
    """It is recorded; each sink gets a copy of its own, with a traceback of its own."""
    pending = PendingResults()
    sinks = [Sink(), Sink()]
    for number, sink in enumerate(sinks):
        pending.submit({SequenceKey(number): sink}, sent)
    assert pending.fail_all(EngineDeadError("first"))
    assert not pending.fail_all(EngineDeadError("second"))
    assert [str(error) for sink in sinks for error in sink.errors] == ["first", "first"]
    assert sinks[0].errors[0] is not sinks[1].errors[0]
    assert str(pending.error) == "first"


def test_a_sink_that_breaks_does_not_keep_the_others_from_their_end() -> None:
    """A fatal error is told to everyone."""

    class Broken(Sink):
        def fail(self, error: TwostrokeError) -> None:
            raise ZeroDivisionError(str(error))

    pending, other = PendingResults(), Sink()
    pending.submit({SequenceKey(1): Broken()}, sent)
    pending.submit({SequenceKey(2): other}, sent)
    pending.fail_all(EngineDeadError("gone"))
    assert [str(error) for error in other.errors] == ["gone"]


class CountingLoop:
    """Stands in for an event loop: counts the wake-ups from other threads."""

    def __init__(self) -> None:
        self.calls = 0

    def call_soon_threadsafe(self, callback: object, *args: object) -> None:
        """Run at once."""
        assert callable(callback)
        self.calls += 1
        callback(*args)


def test_a_batch_wakes_each_loop_once() -> None:
    """Two loops, fifty sinks, two outputs each: two wake-ups, and each sink is woken once."""
    pending, loops = PendingResults(), [CountingLoop(), CountingLoop()]
    sinks = [Sink(loops[number % 2]) for number in range(50)]  # type: ignore[arg-type]  # only one method is used
    keys = [SequenceKey(number) for number in range(50)]
    for key, sink in zip(keys, sinks, strict=True):
        pending.submit({key: sink}, sent)
    pending.deliver([part(key) for key in keys] + [part(key, final=True) for key in keys])
    assert [loop.calls for loop in loops] == [1, 1]
    assert {sink.wakes for sink in sinks} == {1}


async def test_on_the_readers_own_loop_no_wake_up_is_scheduled() -> None:
    """The sink is woken right away."""
    pending, key = PendingResults(), SequenceKey(1)
    sink = Sink(asyncio.get_running_loop())
    pending.submit({key: sink}, sent)
    pending.deliver([part(key)])
    assert sink.wakes == 1


def test_a_closed_loop_does_not_stop_the_others() -> None:
    """A reader went away with its loop."""
    pending, closed, open_loop = PendingResults(), asyncio.new_event_loop(), CountingLoop()
    closed.close()
    pending.submit({SequenceKey(1): Sink(closed)}, sent)
    pending.submit({SequenceKey(2): Sink(open_loop)}, sent)  # type: ignore[arg-type]  # only one method is used
    pending.fail_all(EngineDeadError("gone"))
    assert open_loop.calls == 1


def test_every_sink_has_exactly_one_end_in_a_storm() -> None:
    """Threads submit, deliver and abort at random until the executor dies: no sink is left out or ended twice."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    pending = PendingResults()
    sinks: dict[SequenceKey, Sink] = {}
    refused: list[SequenceKey] = []
    begun = threading.Barrier(5)

    def submit(number: int) -> None:
        begun.wait()
        for count in range(400):
            key = SequenceKey(number * 1000 + count)
            sinks[key] = Sink()
            try:
                pending.submit({key: sinks[key]}, sent)
            except EngineDeadError:
                refused.append(key)

    def disturb(number: int) -> None:
        dice = random.Random(seed + number)
        begun.wait()
        for _ in range(1500):
            key = SequenceKey(dice.randrange(2) * 1000 + dice.randrange(400))
            if dice.random() < 0.5:
                pending.deliver([part(key, final=dice.random() < 0.7)])
            else:
                pending.abort(key.client_id, None)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(2)]
    threads += [threading.Thread(target=disturb, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    if seed % 2:
        pending.fail_all(EngineDeadError("gone"))
    for thread in threads:
        thread.join()
    pending.fail_all(EngineDeadError("gone"))
    ends = Counter(len(sink.errors) + sum(out.final for out in sink.outputs) for sink in sinks.values())
    assert ends[0] == len(refused)
    assert ends[1] == len(sinks) - len(refused)
    assert len(pending) == 0
