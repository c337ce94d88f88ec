"""One sequence of a request as the router follows it: what its client got, who makes it now, and how far it is.

    context --first token(s) and context_phase_params--> handoff --first generated token--> generation
       |  (aggregated workers: straight to generation)                                          |
       +--> done | failed | cancelled <---------------------------------------------------------+

All sequences of a request begin on one context (or aggregated) worker, with one prefill. From the hand-over on each has
a leg of its own.
"""

from router.ledger import ENDED, LedgerPhase
from router.legs import Leg
from router.workers import AttachedWorker, Claim
from twostroke.executor.base import ResultSink
from twostroke.executor.result import OffsetCheck
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.tokens import token_count
from twostroke.protocol.transfer import ContextPhaseParams


class Continuation:
    """One sequence; see the module.

    Args:
        request: The request for this sequence alone, as the client's frontend submitted it.
        client: Sink of the sequence.

    Attributes:
        index: Its number in the request.
        phase: Where it stands; `context` also while workers are looked for.
        offsets: Of the tokens that the client got.
        first_tokens: What the context phase made, int32 buffer.
        params: What a generation worker needs to take over.
        context_leg: Its part of the context phase, or of a whole request on an aggregated worker.
        generation_leg: The latest leg of the generation phase.
        planned: The generation worker that was chosen for it.
        refused_by: Generation workers that did not take it.
    """

    __slots__ = (
        "_first_offset",
        "client",
        "context_leg",
        "first_tokens",
        "generation_leg",
        "index",
        "offsets",
        "params",
        "phase",
        "planned",
        "refused_by",
        "request",
    )

    def __init__(self, request: GenerationRequest, client: ResultSink) -> None:
        self.request = request
        self.client = client
        self.index = request.key.index
        self.phase = LedgerPhase.CONTEXT
        self.offsets = OffsetCheck(token_count(request.generated_ids))
        self._first_offset = self.offsets.expected
        self.first_tokens = b""
        self.params: ContextPhaseParams | None = None
        self.context_leg: Leg | None = None
        self.generation_leg: Leg | None = None
        self.planned: Claim | None = None
        self.refused_by: set[AttachedWorker] = set()

    @property
    def ended(self) -> bool:
        """Whether its client has, or is about to have, its final event."""
        return self.phase in ENDED

    @property
    def output_tokens(self) -> int:
        """Tokens that the client got."""
        return self.offsets.expected - self._first_offset

    def release_plan(self) -> None:
        """Count on the chosen generation worker no longer."""
        if self.planned is not None:
            self.planned.release()
            self.planned = None

    def end(self, phase: LedgerPhase, *, read: bool) -> list[Leg]:
        """Enter a last phase.

        Args:
            phase: How it ends.
            read: Whether it ended after its last token, so that no lease can be left.

        Returns:
            The legs whose workers must be told: they still work for it, or hold a lease for it.
        """
        lease_unread = self.phase is LedgerPhase.HANDOFF and not read
        self.phase = phase
        self.release_plan()
        legs = [leg for leg in (self.context_leg, self.generation_leg) if leg is not None and leg.drop()]
        if lease_unread and self.context_leg is not None:
            legs.append(self.context_leg)
        return legs
