"""What a role adds to the engine loop: its part of a request's life.

One engine serves every role. A context worker leases blocks after the first token, a generation worker fetches blocks
before it decodes; each of those is a `RolePart`, injected by `context_server` and `generation_server`. A worker without
a role runs whole requests and injects none: `AggregatedPart` stands in.

All methods are called on the engine thread, in the order of one round: `before_step`, the engine's step, `after_step`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import CacheMemory
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.durations import HandoverTimes
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.worker import Role


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a role part is built from.

    Attributes:
        role: The worker's role.
        engine: Its engine.
        epoch: The worker's epoch.
        config: Its section of the configuration.
        secret: The cluster's secret of 32 bytes; None where there is none.
        memory: The KV cache as raw memory.
        wake: Makes the engine loop go round; callable from any thread.
    """

    role: Role
    engine: Engine
    epoch: int
    config: EngineConfig
    secret: bytes | None = field(repr=False)
    memory: CacheMemory
    wake: Callable[[], None]


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """KV transfers since the worker started.

    Attributes:
        done: Completed.
        failed: Ended otherwise.
        nbytes: Bytes of KV moved.
        times: How long the parts of hand-overs took that the role knows.
    """

    done: int = 0
    failed: int = 0
    nbytes: int = 0
    times: HandoverTimes = field(default_factory=dict, compare=False)


class RolePart(Protocol):
    """One role's part of a request's life."""

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that this role cannot run.

        Raises:
            RequestError: Why.
        """

    def before_step(self) -> None:
        """Tell the engine what happened to transfers since the last round."""

    def after_step(self) -> list[SequenceOutput]:
        """Hand over what the step finished, start what it reserved blocks for, end what was given up.

        Returns:
            Outputs that the engine left to this part.
        """
        ...

    @property
    def transfers(self) -> TransferCounts:
        """Counts for the heartbeat."""
        ...

    def close(self, deadline_s: float) -> None:
        """End everything within `deadline_s`; nothing is called afterwards."""


MakeRolePart = Callable[[RoleContext], RolePart]
"""What `context_server.worker` and `generation_server.worker` inject."""


def require_phase(request: GenerationRequest, role: Role, *accepted: Phase) -> None:
    """Refuse a request whose phase is not among `accepted`.

    Raises:
        InvalidRequestError: With the phases that this role runs.
    """
    if request.phase not in accepted:
        phases = " and ".join(accepted)
        raise InvalidRequestError(
            f"this worker's role is {role}: it runs {phases} requests, not {request.phase}", "phase"
        )


class AggregatedPart:
    """The part of a worker without a role: whole requests only, and no transfers."""

    transfers = TransferCounts()

    def check(self, request: GenerationRequest) -> None:
        """Refuse anything but a whole request."""
        require_phase(request, Role.AGGREGATED, Phase.FULL)

    def before_step(self) -> None:
        """Nothing happens beside the engine."""

    def after_step(self) -> list[SequenceOutput]:
        """Nothing is handed over."""
        return []

    def close(self, deadline_s: float) -> None:
        """Nothing is open."""
