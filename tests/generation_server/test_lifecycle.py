"""The generation role's part: reserve, fetch, adopt, and every way in which a fetch ends otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from generation_server.lifecycle import GenerationPart
from kvtransfer.events import BlocksSafe, FetchEnded, TransferEvent, TransferOutcome
from tests.support.engine_requests import engine_config, handed_over, make_request
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.protocol.durations import HandoverPart
from twostroke.protocol.errors import ErrorKind, InvalidRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, TransferHandle
from twostroke.protocol.worker import BlockCounts, Role
from twostroke.worker.role_part import TransferCounts

PROMPT = [2, 7, 1, 8, 2, 8]
EXPECTED = expected_output(PROMPT, 4, 1000)
CLIENT_ID = 55
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Fetch:
    """One call."""

    transfer_id: int
    handle: TransferHandle
    positions: tuple[int, ...]
    blocks: tuple[int, ...]
    deadline_s: float


@dataclass
class RecordingAgent:
    """Notes what it is asked, and tells the events that the test puts in."""

    fetches: list[Fetch] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    events: list[TransferEvent] = field(default_factory=list)

    def fetch(
        self,
        transfer_id: int,
        handle: TransferHandle,
        positions: Sequence[int],
        blocks: Sequence[int],
        deadline_s: float,
    ) -> None:
        """Note the fetch."""
        self.fetches.append(Fetch(transfer_id, handle, tuple(positions), tuple(blocks), deadline_s))

    def cancel(self, transfer_id: int) -> None:
        """Note the end that is asked for."""
        self.cancelled.append(transfer_id)

    def poll(self) -> list[TransferEvent]:
        """What the test put in."""
        events, self.events = self.events, []
        return events

    def close(self, deadline_s: float) -> None:
        """Nothing is open."""


class GenerationWorker:
    """An engine of the generation role, its part, and a context worker's cache to fetch from."""

    def __init__(self) -> None:
        self.runner = FakeRunner(block_size=4, num_blocks=16)
        self.engine = Engine(self.runner, engine_config(), Role.GENERATION)
        self.agent = RecordingAgent()
        self.part = GenerationPart(self.engine, self.agent, TIMEOUT_S)
        self._source = FakeRunner(block_size=4, num_blocks=16)

    def hand_over(self) -> GenerationRequest:
        """A generation_only request for `PROMPT`, whose context phase ran into blocks 0 and 1 of another cache."""
        context = Engine(self._source, engine_config(), Role.CONTEXT)
        request = make_request(CLIENT_ID, PROMPT, phase=Phase.CONTEXT_ONLY, max_tokens=4)
        context.add(request)
        context.step()
        (handover,) = context.take_handovers()
        self._source_blocks = handover.blocks
        return handed_over(request, unpack_tokens(handover.output.token_ids), len(handover.blocks))

    def write(self, fetch: Fetch) -> None:
        """What the context worker does."""
        self.runner.copy_blocks_from(self._source, [self._source_blocks[i] for i in fetch.positions], fetch.blocks)

    def go_round(self) -> list[SequenceOutput]:
        """One round of the engine loop."""
        self.part.before_step()
        outputs = self.engine.step() + self.part.after_step()
        self.engine.check()
        return outputs

    @property
    def blocks(self) -> BlockCounts:
        """Blocks by state."""
        return self.engine.load().blocks


@pytest.fixture
def worker() -> GenerationWorker:
    """A worker that waits for the two blocks of one request; its only fetch is `worker.agent.fetches[0]`."""
    worker = GenerationWorker()
    request = worker.hand_over()
    worker.part.check(request)
    worker.engine.add(request)
    assert worker.go_round() == []
    return worker


def test_blocks_are_reserved_and_fetched(worker: GenerationWorker) -> None:
    """The fetch names every block that the prefix cache did not hold, and nothing decodes yet."""
    (fetch,) = worker.agent.fetches
    assert fetch.positions == (0, 1)
    assert fetch.handle.blocks == 2
    assert fetch.deadline_s == TIMEOUT_S
    assert worker.blocks.reserved == 2
    assert worker.runner.plans == []


def test_a_fetch_does_not_wait_for_a_step(worker: GenerationWorker) -> None:
    """It is asked for before the step of its round runs, so that it travels while others decode."""
    other = msgspec.structs.replace(worker.hand_over(), key=SequenceKey(CLIENT_ID + 1))
    worker.engine.add(other)
    worker.part.before_step()
    assert len(worker.agent.fetches) == 2
    assert worker.engine.load().counters.steps == 0


def test_how_long_a_hand_over_took_is_counted(worker: GenerationWorker) -> None:
    """Each part once, and the transfer's own times are those of transfers that landed."""
    (fetch,) = worker.agent.fetches
    worker.write(fetch)
    worker.agent.events.append(FetchEnded(fetch.transfer_id, TransferOutcome.DONE, blocks_safe=True, count=2))
    worker.go_round()
    counted = {part: sum(histogram.counts) for part, histogram in worker.part.transfers.times.items()}
    assert counted == {HandoverPart.RESERVE: 1, HandoverPart.TRANSFER: 1, HandoverPart.FIRST_STEP: 1}


def test_a_landed_transfer_decodes(worker: GenerationWorker) -> None:
    """The next round makes the second token, with offset 1; bytes count as moved."""
    (fetch,) = worker.agent.fetches
    worker.write(fetch)
    worker.agent.events.append(FetchEnded(fetch.transfer_id, TransferOutcome.DONE, blocks_safe=True, count=2))
    outputs = [output for _ in range(3) for output in worker.go_round()]
    assert [output.offset for output in outputs] == [1, 2, 3]
    assert [token for output in outputs for token in unpack_tokens(output.token_ids)] == EXPECTED[1:]
    assert worker.part.transfers == TransferCounts(done=1, nbytes=2 * worker.runner.facts.block_bytes)


def test_what_the_prefix_cache_holds_is_not_fetched_again(worker: GenerationWorker) -> None:
    """A second request with the same prompt fetches its last, partly filled block alone."""
    test_a_landed_transfer_decodes(worker)
    request = worker.hand_over()
    worker.engine.add(request)
    worker.go_round()
    assert worker.agent.fetches[1].positions == (1,)


def test_a_failed_transfer_fails_its_request(worker: GenerationWorker) -> None:
    """The frontend is told the reason as a transfer error; the blocks are free at once."""
    (fetch,) = worker.agent.fetches
    worker.agent.events.append(
        FetchEnded(fetch.transfer_id, TransferOutcome.FAILED, blocks_safe=True, reason="connection refused")
    )
    (output,) = worker.go_round()
    assert output.error is not None
    assert output.error.kind is ErrorKind.TRANSFER
    assert "connection refused" in output.error.message
    assert worker.blocks == BlockCounts(free=16)
    assert worker.part.transfers == TransferCounts(failed=1)


def test_blocks_that_a_peer_may_still_write_are_quarantined(worker: GenerationWorker) -> None:
    """The request fails at once; its blocks are free only after the proof."""
    (fetch,) = worker.agent.fetches
    worker.agent.events.append(
        FetchEnded(fetch.transfer_id, TransferOutcome.EXPIRED, blocks_safe=False, reason="silent")
    )
    (output,) = worker.go_round()
    assert output.error is not None
    assert worker.blocks.quarantined == 2
    worker.agent.events.append(BlocksSafe(fetch.transfer_id))
    worker.go_round()
    assert worker.blocks == BlockCounts(free=16)


def test_an_abort_cancels_the_fetch(worker: GenerationWorker) -> None:
    """The final event comes at once; the blocks stay reserved until the agent says that the transfer is over."""
    (fetch,) = worker.agent.fetches
    worker.engine.abort(CLIENT_ID)
    (output,) = worker.go_round()
    assert output.error is not None
    assert output.error.kind is ErrorKind.ABORTED
    assert worker.agent.cancelled == [fetch.transfer_id]
    assert worker.blocks.reserved == 2
    worker.agent.events.append(FetchEnded(fetch.transfer_id, TransferOutcome.CANCELLED, blocks_safe=True))
    assert worker.go_round() == []
    assert worker.blocks == BlockCounts(free=16)


def test_a_transfer_that_lands_after_the_abort_is_given_up(worker: GenerationWorker) -> None:
    """`DONE` may cross the cancellation on the way: the blocks are released, nothing decodes."""
    (fetch,) = worker.agent.fetches
    worker.engine.abort(CLIENT_ID)
    worker.go_round()
    worker.agent.events.append(FetchEnded(fetch.transfer_id, TransferOutcome.DONE, blocks_safe=True, count=2))
    assert worker.go_round() == []
    assert worker.blocks == BlockCounts(free=16)
    assert worker.runner.plans == []


def test_whole_requests_are_run_too(worker: GenerationWorker) -> None:
    """A request without context phase is computed here from its prompt on."""
    request = make_request(CLIENT_ID + 1, PROMPT, max_tokens=4)
    worker.part.check(request)
    worker.engine.add(request)
    outputs = [output for _ in range(4) for output in worker.go_round()]
    assert [token for output in outputs for token in unpack_tokens(output.token_ids)] == EXPECTED


def test_context_phases_are_refused(worker: GenerationWorker) -> None:
    """They belong to a context worker."""
    with pytest.raises(InvalidRequestError, match="role is generation") as caught:
        worker.part.check(make_request(CLIENT_ID, PROMPT, phase=Phase.CONTEXT_ONLY))
    assert caught.value.param == "phase"


def test_another_layout_is_refused_with_both_fingerprints(worker: GenerationWorker) -> None:
    """Caches of different block sizes do not fit together."""
    request = worker.hand_over()
    params = request.context_phase_params
    assert params is not None
    layout = msgspec.structs.replace(params.handle.layout, block_size=8)
    handle = msgspec.structs.replace(params.handle, layout=layout)
    params = msgspec.structs.replace(params, handle=handle)
    request = msgspec.structs.replace(request, context_phase_params=params)
    with pytest.raises(InvalidRequestError, match=r"block_size=8.*block_size=4"):
        worker.part.check(request)


def test_another_version_is_refused(worker: GenerationWorker) -> None:
    """Both versions are named."""
    request = worker.hand_over()
    params = request.context_phase_params
    assert params is not None
    request = msgspec.structs.replace(request, context_phase_params=msgspec.structs.replace(params, version=99))
    with pytest.raises(InvalidRequestError, match=f"version 99, this worker version {TRANSFER_VERSION}"):
        worker.part.check(request)
