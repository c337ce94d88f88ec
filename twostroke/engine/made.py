"""What one step made for one sequence, and the output that tells of it."""

import msgspec

from twostroke.engine.finish import Finish
from twostroke.engine.interfaces import SampledToken
from twostroke.engine.sequence import Sequence
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.tokens import pack_tokens


class Made(msgspec.Struct, frozen=True):
    """A token that a step made, already part of its sequence, and whether it ends it here."""

    sequence: Sequence
    token: SampledToken
    finish: Finish | None

    @property
    def due(self) -> bool:
        """Whether the frontend is told now: of an end always, else as the request asks for."""
        return self.finish is not None or self.sequence.due

    def hold_back(self) -> None:
        """Tell the frontend later, together with the tokens that follow."""
        self.sequence.hold_back(self.token.logprobs)

    def output(self) -> SequenceOutput:
        """What the frontend is told; the first one also carries what is known of the prompt."""
        sequence, finish = self.sequence, self.finish
        # A generation worker's first token is not the sequence's own: with that the context worker told of prefix hits.
        is_first = sequence.told_tokens == sequence.received_tokens
        reports_cache = is_first and sequence.request.phase is not Phase.GENERATION_ONLY
        offset = sequence.told_tokens
        token_ids, logprobs = sequence.tell(self.token.logprobs)
        return SequenceOutput(
            key=sequence.key,
            offset=offset,
            token_ids=pack_tokens(token_ids),
            logprobs=logprobs,
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
            cached_tokens=sequence.cached_tokens if reports_cache else None,
            prompt_logprobs=sequence.take_prompt_logprobs(),
        )
