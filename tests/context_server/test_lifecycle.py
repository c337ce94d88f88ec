"""The context role's part: first token and lease in one message, and the lease's end in every way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from context_server.lifecycle import ContextPart
from kvtransfer.counters import TransferCounters
from kvtransfer.events import LeaseEnded, TransferEvent, TransferOutcome
from tests.support.engine_requests import LAYOUT, engine_config, handed_over, make_request
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, TransferHandle
from twostroke.protocol.worker import Role
from twostroke.worker.role_part import TransferCounts

PROMPT = [3, 1, 4, 1, 5, 9]
CLIENT_ID = 77
LEASE_S = 30.0


@dataclass
class RecordingAgent:
    """Notes what it is asked, and tells the events that the test puts in."""

    offers: list[tuple[SequenceKey, tuple[int, ...], float]] = field(default_factory=list)
    revoked: list[SequenceKey] = field(default_factory=list)
    events: list[TransferEvent] = field(default_factory=list)
    closed_within_s: float | None = None

    def offer(self, key: SequenceKey, blocks: Sequence[int], expiry_s: float) -> TransferHandle:
        """Note the lease."""
        self.offers.append((key, tuple(blocks), expiry_s))
        return TransferHandle(
            version=TRANSFER_VERSION,
            epoch=1,
            key=key,
            address="tcp://127.0.0.1:1",
            layout=LAYOUT,
            blocks=len(blocks),
            expires_in_s=expiry_s,
        )

    def revoke(self, key: SequenceKey) -> None:
        """Note the end that is asked for."""
        self.revoked.append(key)

    def poll(self) -> list[TransferEvent]:
        """What the test put in."""
        events, self.events = self.events, []
        return events

    def counters(self) -> TransferCounters:
        """As if the first lease had moved 64 bytes."""
        return TransferCounters(bytes_written=64)

    def close(self, deadline_s: float) -> None:
        """Note the deadline."""
        self.closed_within_s = deadline_s


class ContextWorker:
    """An engine of the context role and its part."""

    def __init__(self) -> None:
        self.engine = Engine(FakeRunner(block_size=4, num_blocks=16), engine_config(), Role.CONTEXT)
        self.agent = RecordingAgent()
        self.part = ContextPart(self.engine, self.agent, LEASE_S)

    def go_round(self) -> list[SequenceOutput]:
        """One round of the engine loop."""
        self.part.before_step()
        return self.engine.step() + self.part.after_step()

    @property
    def leased(self) -> int:
        """Leased blocks."""
        return self.engine.load().blocks.leased


@pytest.fixture
def worker() -> ContextWorker:
    """A worker that runs one request with its first step."""
    worker = ContextWorker()
    worker.engine.add(make_request(CLIENT_ID, PROMPT, phase=Phase.CONTEXT_ONLY, max_tokens=8))
    return worker


def test_the_first_token_travels_with_the_parameters(worker: ContextWorker) -> None:
    """One final HANDOVER output holds the token and all that the generation worker needs; two blocks are leased."""
    (output,) = worker.go_round()
    first = expected_output(PROMPT, 1, 1000)
    assert unpack_tokens(output.token_ids) == first
    assert output.finish_reason is FinishReason.HANDOVER
    params = output.context_phase_params
    assert params is not None
    assert (params.version, params.prompt_tokens) == (TRANSFER_VERSION, len(PROMPT))
    assert unpack_tokens(params.first_token_ids) == first
    assert params.handle.blocks == worker.leased == 2
    ((key, blocks, expiry_s),) = worker.agent.offers
    assert (key, len(blocks), expiry_s) == (SequenceKey(CLIENT_ID), 2, LEASE_S)


def test_a_read_lease_gives_its_blocks_up(worker: ContextWorker) -> None:
    """After `LeaseEnded` the full block is cached, the other free, and the transfer counts as done."""
    worker.go_round()
    worker.agent.events.append(LeaseEnded(SequenceKey(CLIENT_ID), TransferOutcome.DONE))
    worker.go_round()
    blocks = worker.engine.load().blocks
    assert (blocks.leased, blocks.cached, blocks.free) == (0, 1, 15)
    assert worker.part.transfers == TransferCounts(done=1, nbytes=64)


@pytest.mark.parametrize("outcome", [TransferOutcome.EXPIRED, TransferOutcome.CANCELLED, TransferOutcome.FAILED])
def test_an_unread_lease_gives_its_blocks_up_too(worker: ContextWorker, outcome: TransferOutcome) -> None:
    """However it ended, the blocks come back; it counts as failed."""
    worker.go_round()
    worker.agent.events.append(LeaseEnded(SequenceKey(CLIENT_ID), outcome))
    worker.go_round()
    assert worker.leased == 0
    assert worker.part.transfers == TransferCounts(failed=1, nbytes=64)


def test_an_abort_after_the_handover_revokes_the_lease(worker: ContextWorker) -> None:
    """The blocks stay leased until the agent says that nothing reads them; no second final event is made."""
    worker.go_round()
    worker.engine.abort(CLIENT_ID)
    assert worker.go_round() == []
    assert worker.agent.revoked == [SequenceKey(CLIENT_ID)]
    assert worker.leased == 2
    worker.agent.events.append(LeaseEnded(SequenceKey(CLIENT_ID), TransferOutcome.CANCELLED))
    assert worker.go_round() == []
    assert worker.leased == 0


def test_a_sequence_that_ends_with_its_first_token_is_not_handed_over(worker: ContextWorker) -> None:
    """With nothing left to generate there is nothing to lease."""
    worker.engine.abort(CLIENT_ID)
    worker.engine.add(make_request(CLIENT_ID + 1, PROMPT, phase=Phase.CONTEXT_ONLY, max_tokens=1))
    aborted, output = worker.go_round()
    assert aborted.error is not None
    assert output.finish_reason is FinishReason.LENGTH
    assert output.context_phase_params is None
    assert worker.agent.offers == []


def test_other_phases_are_refused(worker: ContextWorker) -> None:
    """A context worker decodes nothing beyond the first token."""
    whole = make_request(CLIENT_ID, PROMPT)
    for request in (whole, handed_over(whole, [5], blocks=2)):
        with pytest.raises(InvalidRequestError, match="role is context") as caught:
            worker.part.check(request)
        assert caught.value.param == "phase"


def test_close_passes_its_deadline_on(worker: ContextWorker) -> None:
    """The agent ends all leases within the time that is left."""
    worker.part.close(1.5)
    assert worker.agent.closed_within_s == 1.5
