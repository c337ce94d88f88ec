"""What a worker sends to a frontend: one message per engine step and frontend.

Outputs are made by the thousand, and hold nothing that could hold them: the garbage collector need not look at them
(`gc=False`; reference counts free them).
"""

import enum

import msgspec

from twostroke.protocol.errors import ErrorInfo
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.transfer import ContextPhaseParams
from twostroke.protocol.worker import Attached, AttachRefused, Heartbeat, WorkerStopping


class FinishReason(enum.StrEnum):
    """Why a sequence has ended at this worker.

    `HANDOVER` ends the context leg of a request that goes on elsewhere; clients never see it.
    """

    STOP = "stop"
    LENGTH = "length"
    HANDOVER = "handover"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one output position, of the raw distribution (before temperature and filters).

    Attributes:
        chosen: Logprob of the chosen token (nats).
        top_ids: The likeliest tokens, likeliest first; as many as were asked for.
        top: Their logprobs, same order.
    """

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What engine steps made for one sequence; final when `finish_reason` or `error` is set.

    Each step's token comes by itself, unless the request lets some be told together (`tell_every`).

    Attributes:
        key: The sequence.
        offset: Index, in the sequence's whole output, of the first token in `token_ids`; equals the number of output
            tokens before it, `generated_ids` of the request included. A gap is an error, a repeat is dropped.
        token_ids: New tokens, int32 buffer; may be empty in a final message.
        logprobs: One entry a token, if asked for.
        finish_reason: Set in the last message of a sequence that ended well.
        stop_token_id: Which stop token ended it, if one did.
        error: Set in the last message of a sequence that failed.
        cached_tokens: Prompt tokens found in the prefix cache; sent with the first token.
        context_phase_params: With `HANDOVER`.
        prompt_logprobs: Of all prompt tokens but the first; sent with the first token, if asked for.
    """

    key: SequenceKey
    offset: int
    token_ids: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ErrorInfo | None = None
    cached_tokens: int | None = None
    context_phase_params: ContextPhaseParams | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def final(self) -> bool:
        """Whether nothing follows for this sequence from this worker."""
        return self.finish_reason is not None or self.error is not None


class ResponseBatch(msgspec.Struct, frozen=True, array_like=True, tag="responses"):
    """All outputs of one engine step for one frontend.

    Attributes:
        epoch: The worker's epoch.
        outputs: One entry a sequence.
    """

    epoch: int
    outputs: list[SequenceOutput]


FrontendBound = ResponseBatch | Heartbeat | Attached | AttachRefused | WorkerStopping
"""Everything that a worker sends to a frontend. All of these are array-like and tagged."""
