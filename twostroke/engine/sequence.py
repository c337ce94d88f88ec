"""One sequence inside the engine, and the states of its life.

    full, context_only                          generation_only

      WAITING <--- preempted ---+                 RESERVING
         |                      |                     | blocks found
         | admitted             |                     v
         v                      |                TRANSFERRING ----------+
      RUNNING ------------------+                     | landed          | given up while the peer
         |      | first token of                      v                 | may still write
         |      | a context_only request           RUNNING              v
         |      v                               (as on the left)    CANCELLING
         |    LEASED                                                    |
         |      | transfer over,                                        v   no proof that it stopped
         |      | revoked or expired                               QUARANTINED
         v      v                                                       |
        ENDED <---------------------------------------------------------+

A sequence that lets a sibling (`n`) compute or fetch the prompt for it begins in `FOLLOWING`; `siblings` draws how it
goes on. Every state may lead to `ENDED` (abort, deadline, error), except that blocks which a peer may still write hold
their sequence in `CANCELLING` or `QUARANTINED` until the transfer says otherwise. A preempted sequence gives its blocks
up and is computed again from prompt and output, wherever its K and V came from the first time.

`token_ids` is prompt and output in one list. `computed` positions of it have K and V in `blocks`; a step computes some
of the `remaining` ones, and when none remain the last position's logits give the next token.
"""

import enum

from twostroke.engine.bad_words import BadWords
from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.finish import Finish, FinishRules
from twostroke.engine.token_history import TokenHistory
from twostroke.protocol.blockhash import block_hash, root_hash
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import TokenLogprobs
from twostroke.protocol.tokens import token_count, unpack_tokens


class SequenceState(enum.Enum):
    """Where a sequence is in its life; see the module's docstring."""

    FOLLOWING = "following"
    WAITING = "waiting"
    RUNNING = "running"
    LEASED = "leased"
    RESERVING = "reserving"
    TRANSFERRING = "transferring"
    CANCELLING = "cancelling"
    QUARANTINED = "quarantined"
    ENDED = "ended"


_S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    _S.FOLLOWING: frozenset({_S.WAITING, _S.RUNNING, _S.LEASED, _S.RESERVING, _S.ENDED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.ENDED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.LEASED, _S.ENDED}),
    _S.LEASED: frozenset({_S.ENDED}),
    _S.RESERVING: frozenset({_S.TRANSFERRING, _S.ENDED}),
    _S.TRANSFERRING: frozenset({_S.RUNNING, _S.CANCELLING, _S.QUARANTINED, _S.ENDED}),
    _S.CANCELLING: frozenset({_S.QUARANTINED, _S.ENDED}),
    _S.QUARANTINED: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


class Sequence:
    """One sequence.

    Attributes:
        request_id: The engine's own number; grows with arrival, and so orders sequences by age.
        key: Its name outside.
        request: What was asked.
        rules: When it ends.
        token_ids: Prompt and output.
        prompt_tokens: How many of them are prompt.
        received_tokens: How many of them are output that other workers made.
        blocks: Its block table: block `i` holds positions `i * block_size` up.
        queued_at: When it came, in seconds of the engine's clock.
        computed: Positions whose K and V are in the blocks.
        published: Blocks, from the first, that were offered to the prefix cache.
        landing: Index in `blocks` of the first that a KV transfer fills.
        cached_tokens: Prompt tokens found in the prefix cache when it was first admitted; None before.
        history: The tokens so far, for penalties; None without any.
        constraint: Follows the output through its grammar; None without one. Given right after construction.
        told_tokens: How much of the output, from the first token on, its frontend knows.
        leader: The sibling that it follows; None for a sequence that goes its own way.
        followers: Its siblings that follow it, by index.

    Args:
        request_id: As above.
        request: As above; for one sequence.
        rules: As above.
        model_digest: Part of the block hash.
        leader: As above.
    """

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        rules: FinishRules,
        model_digest: str,
        leader: "Sequence | None" = None,
    ) -> None:
        self.request_id = request_id
        self.key: SequenceKey = request.key
        self.request = request
        self.rules = rules
        self.token_ids = unpack_tokens(request.prompt_ids) + unpack_tokens(request.generated_ids)
        self.prompt_tokens = token_count(request.prompt_ids)
        self.received_tokens = self.told_tokens = token_count(request.generated_ids)
        self._untold_logprobs: list[TokenLogprobs] = []
        self.blocks: list[int] = []
        self.queued_at = 0.0
        self.computed = 0
        self.published = 0
        self.landing = 0
        self.cached_tokens: int | None = None
        sampling, output = request.sampling, self.token_ids[self.prompt_tokens :]
        self.constraint: TokenConstraint | None = None
        self.history: TokenHistory | None = None
        if sampling.penalized:
            self.history = TokenHistory.wanted(sampling, self.token_ids[: self.prompt_tokens], output)
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        # Whoever made the first token sent these with it.
        scores_prompt = sampling.prompt_logprobs is not None and not self.received_tokens
        self._prompt_scores: list[PromptLogprobs] | None = [] if scores_prompt else None
        self.leader = leader
        self.followers: list[Sequence] = []
        if leader is not None:
            leader.followers.append(self)
        self._state = self.queue_state if leader is None else _S.FOLLOWING
        self._hashes = [root_hash(model_digest, request.cache_salt)]

    @property
    def state(self) -> SequenceState:
        """Where the sequence is in its life."""
        return self._state

    @property
    def queue_state(self) -> SequenceState:
        """Where a sequence without blocks waits for them."""
        return _S.RESERVING if self.request.phase is Phase.GENERATION_ONLY else _S.WAITING

    @property
    def remaining(self) -> int:
        """Tokens whose K and V are not computed; 1 for a sequence that decodes."""
        return len(self.token_ids) - self.computed

    @property
    def output_tokens(self) -> int:
        """Length of the output, tokens made by other workers included."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def handed_over(self) -> int:
        """Positions whose K and V a generation_only request brings: all before the context phase's first token."""
        params = self.request.context_phase_params
        known = self.prompt_tokens + self.received_tokens
        return known - token_count(params.first_token_ids) if params else 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt is computed whole, without the prefix cache, for the logprobs of its tokens."""
        return self._prompt_scores is not None

    def take_over_prompt(self, leader: "Sequence") -> None:
        """Know of the prompt what `leader` found out while computing it for both: prefix hits, hashes, logprobs."""
        self.cached_tokens = leader.cached_tokens
        self._hashes = list(leader._hashes)  # noqa: SLF001 - of its own class
        self._prompt_scores = leader._prompt_scores  # noqa: SLF001 - likewise

    def append(self, token_id: int) -> None:
        """The output got another token.

        Raises:
            InvalidRequestError: Its grammar does not allow that token; nothing has changed.
        """
        if self.constraint is not None:
            self.constraint.advance((token_id,))
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.add(token_id)

    @property
    def due(self) -> bool:
        """Whether the frontend is to hear of the newest token now; see `GenerationRequest.tell_every`."""
        untold = self.output_tokens - self.told_tokens
        return self.told_tokens == self.received_tokens or untold >= self.request.tell_every

    def hold_back(self, logprobs: TokenLogprobs | None) -> None:
        """Tell of the newest token later; `logprobs` are its own."""
        if logprobs is not None:
            self._untold_logprobs.append(logprobs)

    def tell(self, logprobs: TokenLogprobs | None) -> tuple[list[int], tuple[TokenLogprobs, ...] | None]:
        """The tokens that were not told, and their logprobs if asked for; `logprobs` are the newest one's."""
        token_ids = self.token_ids[self.prompt_tokens + self.told_tokens :]
        self.told_tokens = self.output_tokens
        self.hold_back(logprobs)
        told = tuple(self._untold_logprobs) or None
        self._untold_logprobs = []
        return token_ids, told

    def finish(self) -> Finish | None:
        """Whether the newest token ends the output, and how."""
        complete = self.constraint is not None and self.constraint.finished
        return self.rules.finish(self.token_ids[-1], self.output_tokens, len(self.token_ids), complete=complete)

    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that must not come next, sorted."""
        ending = self.rules.forbidden_ids(self.output_tokens)
        if self._bad_words is None:
            return ending
        return tuple(sorted(self._bad_words.completing(self.token_ids, self.output_tokens).union(ending)))

    def prompt_targets(self, start: int, end: int) -> list[int]:
        """The prompt tokens whose logprobs come of computing positions `start .. end`; none if nobody asked."""
        return self.token_ids[start + 1 : min(end + 1, self.prompt_tokens)] if self.scores_prompt else []

    def add_prompt_scores(self, start: int, scores: PromptLogprobs) -> None:
        """Keep the logprobs that computing from `start` on gave; a prompt that is computed again starts anew."""
        assert self._prompt_scores is not None  # noqa: S101 - slices have targets only where they are asked for
        if start == 0:
            self._prompt_scores.clear()
        self._prompt_scores.append(scores)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The logprobs of the whole prompt, once: they go out with the first token. None if nobody asked."""
        scores, self._prompt_scores = self._prompt_scores, None
        return None if scores is None else PromptLogprobs.join(scores)

    def move(self, to: SequenceState) -> None:
        """Enter the state `to`.

        Raises:
            RuntimeError: The table has no such transition.
        """
        if to not in TRANSITIONS[self._state]:
            raise RuntimeError(f"sequence {self.key} cannot go from {self._state.value} to {to.value}")
        self._state = to

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first `count` full blocks; each is computed once.

        Raises:
            ValueError: The sequence has fewer full blocks.
        """
        if count * block_size > len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens do not fill {count} blocks of {block_size}")
        for index in range(len(self._hashes) - 1, count):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            self._hashes.append(block_hash(self._hashes[-1], tokens))
        return self._hashes[1 : count + 1]
