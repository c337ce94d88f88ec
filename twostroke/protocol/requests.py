"""What a frontend sends to a worker.

One queue carries requests, aborts and control, in order, so that an abort never overtakes its request.
"""

import enum
from typing import Self

import msgspec

from twostroke.protocol.constraint import Constraint
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import TOKEN_BYTES
from twostroke.protocol.transfer import ContextPhaseParams

PROTOCOL_VERSION = 4
"""Version of the messages between frontends and workers; both sides refuse another one at attach."""
MAX_N = 1024
"""Sequences of one request at most; frontends may set a lower bound."""


class Phase(enum.StrEnum):
    """Which part of a request's life a worker runs."""

    FULL = "full"
    CONTEXT_ONLY = "context_only"
    GENERATION_ONLY = "generation_only"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One prompt, and `n` sequences to make from it. Crosses once; later messages about it carry keys alone.

    Attributes:
        key: Names the sequence everywhere; of several sequences, the first one (index 0).
        prompt_ids: The whole prompt, int32 buffer.
        generated_ids: Output tokens that other workers made already (resume or hand-over), int32 buffer. The offset of
            the first token that this worker makes is their number.
        sampling: How tokens are chosen.
        phase: Which part of the life to run. `CONTEXT_ONLY` makes one token and leases the blocks; `GENERATION_ONLY`
            takes over from `context_phase_params`, whose first tokens are also the tail of `generated_ids`.
        context_phase_params: For `GENERATION_ONLY` only.
        constraint: What the text of the output must look like; None for anything.
        cache_salt: Separates prefix caches; part of the block hash.
        deadline_s: Seconds from arrival after which the worker ends the request with `DeadlineError`; None for never.
        n: How many sequences: indexes 0 to n - 1, one prefill for all. Each then goes its own way (`sequences`), so
            that tokens made before, and hand-overs, belong to one sequence alone.
        tell_every: Tokens that a worker may tell of together, for a frontend that needs none of them before the rest:
            each output costs its way there. The first token and the end are told at once all the same; an error drops
            what was not told yet.

    Raises:
        ValueError: The prompt is empty, a token buffer is cut off, or parameters do not go together.
    """

    key: SequenceKey
    prompt_ids: bytes
    sampling: SamplingParams
    generated_ids: bytes = b""
    phase: Phase = Phase.FULL
    context_phase_params: ContextPhaseParams | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    deadline_s: float | None = None
    n: int = 1
    tell_every: int = 1

    def __post_init__(self) -> None:
        # Runs with each leg of a request: what is plainly right is seen at once.
        if self.n != 1:
            self._check_n()
        if self.tell_every < 1:
            raise ValueError(f"tell_every must be at least 1, not {self.tell_every}")
        if not self.prompt_ids:
            raise ValueError("prompt must hold at least one token, not 0")
        if (len(self.prompt_ids) | len(self.generated_ids)) % TOKEN_BYTES:
            raise ValueError("token buffers must hold whole int32 values")
        if (self.phase is Phase.GENERATION_ONLY) != (self.context_phase_params is not None):
            raise ValueError(f"context_phase_params go with generation_only and nothing else, not with {self.phase}")

    def _check_n(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be from 1 to {MAX_N}, not {self.n}")
        if self.key.index or self.generated_ids or self.phase is Phase.GENERATION_ONLY:
            raise ValueError(f"n of {self.n} does not go with an index, generated_ids or generation_only")

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        """The keys of all its sequences."""
        if self.n == 1:
            return (self.key,)
        return tuple(SequenceKey(self.key.client_id, index, self.key.attempt) for index in range(self.n))

    def sequences(self) -> tuple[Self, ...]:
        """A request for each of its sequences alone, with the seed that belongs to its index."""
        if self.n == 1:
            return (self,)
        return tuple(
            msgspec.structs.replace(self, key=key, sampling=self.sampling.for_index(key.index), n=1)
            for key in self.keys
        )


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one index of it. Ends a context_only request's lease too.

    Attributes:
        client_id: The request.
        index: One index only; None for all.
    """

    client_id: int
    index: int | None = None


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """First message of an attached frontend on a fresh socket.

    Attributes:
        version: `PROTOCOL_VERSION` of the frontend.
        frontend_id: Its 16-bit id; refused if another live frontend of this worker holds it.
    """

    version: int
    frontend_id: int


class FrontendBeat(msgspec.Struct, frozen=True, tag="frontend_beat"):
    """An attached frontend lives; a worker aborts the requests of one that fell silent."""

    frontend_id: int


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """An attached frontend leaves; its requests were aborted before."""

    frontend_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new request; finish the running ones. Honoured from the launching frontend only."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the worker within `deadline_s`. Honoured from the launching frontend only."""

    deadline_s: float


WorkerBound = GenerationRequest | Abort | Attach | FrontendBeat | Detach | Drain | Shutdown
"""Everything that may arrive at a worker."""


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One message to a worker, with the epoch it is meant for.

    Attributes:
        epoch: The worker's epoch as the frontend knows it; 0 before it is known (`Attach`).
        body: The message.
    """

    epoch: int
    body: WorkerBound
