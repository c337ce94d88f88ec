"""What the engine and a role's part of a request's life tell each other about hand-overs.

Context:     step -> `Handover` -> the role part offers the blocks and answers with context_phase_params -> `end_lease`
Generation:  step -> `Reservation` -> the role part fetches -> `adopt`, or `fail_reservation` and, where blocks were
             not safe, `release_quarantine`

The engine never touches blocks that a transfer may touch before the role part says that it is over.
"""

from dataclasses import dataclass

from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.transfer import TransferHandle


@dataclass(frozen=True, slots=True)
class Handover:
    """A context_only sequence made its first token; its blocks are leased until `end_lease`.

    Attributes:
        key: The sequence.
        request_id: The engine's own id of it.
        blocks: The blocks with all K and V that were computed, first to last; the last may be partly filled.
        prompt_tokens: Length of the prompt.
        output: The first token, not sent yet: the role part completes it with `HANDOVER` and context_phase_params.
    """

    key: SequenceKey
    request_id: int
    blocks: tuple[int, ...]
    prompt_tokens: int
    output: SequenceOutput


@dataclass(frozen=True, slots=True)
class Reservation:
    """A generation_only sequence got its blocks; the role part fetches what they lack.

    Attributes:
        key: The sequence.
        request_id: The engine's own id of it; never used twice in an epoch, so it can name the transfer.
        handle: Where the blocks come from.
        positions: Numbers within the context worker's leased list; empty where the prefix cache held everything.
        blocks: The local block for each of them.
        waited_s: How long the request waited for its blocks.
    """

    key: SequenceKey
    request_id: int
    handle: TransferHandle
    positions: tuple[int, ...]
    blocks: tuple[int, ...]
    waited_s: float
