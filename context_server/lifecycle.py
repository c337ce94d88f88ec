"""The context role's part of a request's life: after the first token, a lease.

    step makes the first token --> blocks are leased, the answer goes out with context_phase_params
    the agent says LeaseEnded   --> the engine gives the blocks up (they stay in the prefix cache)
    abort, lost frontend        --> the lease is revoked; LeaseEnded follows once no write reads the blocks

The first token travels in the same message as the parameters, so a client never waits for the KV transfer to see it.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from kvtransfer.counters import TransferCounters
from kvtransfer.events import LeaseEnded, TransferEvent, TransferOutcome
from twostroke.engine.engine import Engine
from twostroke.engine.handover import Handover
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.transfer import TRANSFER_VERSION, ContextPhaseParams, TransferHandle
from twostroke.protocol.worker import Role
from twostroke.worker.role_part import TransferCounts, require_phase


class LeaseAgent(Protocol):
    """What this role needs of `kvtransfer`'s agent."""

    def offer(self, key: SequenceKey, blocks: Sequence[int], expiry_s: float) -> TransferHandle:
        """Start a lease."""
        ...

    def revoke(self, key: SequenceKey) -> None:
        """End a lease early; `LeaseEnded` follows."""

    def poll(self) -> list[TransferEvent]:
        """What happened since the last call."""
        ...

    def counters(self) -> TransferCounters:
        """Its own numbers."""
        ...

    def close(self, deadline_s: float) -> None:
        """End everything."""


class ContextPart:
    """See the module.

    Args:
        engine: The worker's engine.
        agent: Serves the leases.
        lease_s: How long a lease waits for its reader.
    """

    def __init__(self, engine: Engine, agent: LeaseAgent, lease_s: float) -> None:
        self._engine = engine
        self._agent = agent
        self._lease_s = lease_s
        self._done = self._failed = 0
        self._log = structlog.get_logger(__name__)

    @property
    def transfers(self) -> TransferCounts:
        """Leases that were read whole, those that ended otherwise, and the bytes written for both."""
        counters = self._agent.counters()
        return TransferCounts(self._done, self._failed, counters.bytes_written, counters.times)

    def check(self, request: GenerationRequest) -> None:
        """Only the context phase is run here: what decodes would stall behind long prompts."""
        require_phase(request, Role.CONTEXT, Phase.CONTEXT_ONLY)

    def before_step(self) -> None:
        """Give up the blocks of leases that have ended."""
        for event in self._agent.poll():
            if isinstance(event, LeaseEnded):
                self._count(event)
                self._engine.end_lease(event.key)

    def after_step(self) -> list[SequenceOutput]:
        """Revoke what was given up, and hand over what got its first token."""
        for key in self._engine.take_cancellations():
            self._agent.revoke(key)
        return [self._hand_over(handover) for handover in self._engine.take_handovers()]

    def close(self, deadline_s: float) -> None:
        """End all leases; readers that still wait are told."""
        self._agent.close(deadline_s)

    def _hand_over(self, handover: Handover) -> SequenceOutput:
        """Lease the blocks, and complete the output that goes to the frontend."""
        handle = self._agent.offer(handover.key, handover.blocks, self._lease_s)
        params = ContextPhaseParams(
            version=TRANSFER_VERSION,
            handle=handle,
            prompt_tokens=handover.prompt_tokens,
            first_token_ids=handover.output.token_ids,
        )
        return msgspec.structs.replace(
            handover.output, finish_reason=FinishReason.HANDOVER, context_phase_params=params
        )

    def _count(self, event: LeaseEnded) -> None:
        if event.outcome is TransferOutcome.DONE:
            self._done += 1
            return
        self._failed += 1
        # Clients that leave are everyday life; an expiry or a failure is not.
        level = self._log.debug if event.outcome is TransferOutcome.CANCELLED else self._log.warning
        level("lease ended unread", key=str(event.key), outcome=event.outcome.value)
