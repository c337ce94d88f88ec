"""One worker as the router sees it: the address it attaches to, and one attached epoch behind that address.

    attaching --attached--> live <--silence, heartbeats--> suspect
        ^                    |                                |
        |                    +------ the link is dead --------+
        |                    v
        +---- again ------ dead

`live` takes new work; `suspect` (nothing heard for a while) keeps what it has and gets nothing new; `dead` is left, and
the address is attached to again: what answers there then is another epoch. A worker that does not fit the others
(role, model, layout) is refused and stays `attaching`, with the reason.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import msgspec

from router.policy import estimated_load
from twostroke.executor.base import Health, HealthState, ResultSink
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.worker import Role, WorkerDescription, WorkerLoad


class WorkerLink(Protocol):
    """One attached worker epoch: what the router needs of a `RemoteExecutor`."""

    @property
    def epoch(self) -> int:
        """The epoch that was attached to."""
        ...

    @property
    def description(self) -> WorkerDescription:
        """What the worker said of itself."""
        ...

    @property
    def load(self) -> WorkerLoad:
        """Its last report; a new object with each heartbeat."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since anything was heard of it."""
        ...

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """As `GenerationExecutor.submit_to`."""
        ...

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """As `GenerationExecutor.abort_request`."""
        ...

    def check_health(self) -> Health:
        """As `GenerationExecutor.check_health`."""
        ...

    def shutdown(self, deadline_s: float | None = None) -> None:
        """As `GenerationExecutor.shutdown`."""
        ...


class WorkerState(enum.StrEnum):
    """How the worker behind one address fares."""

    ATTACHING = "attaching"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = MappingProxyType(
    {
        WorkerState.ATTACHING: frozenset({WorkerState.LIVE, WorkerState.DEAD}),
        WorkerState.LIVE: frozenset({WorkerState.SUSPECT, WorkerState.DEAD}),
        WorkerState.SUSPECT: frozenset({WorkerState.LIVE, WorkerState.DEAD}),
        WorkerState.DEAD: frozenset({WorkerState.ATTACHING}),
    }
)
"""Which states may follow each. `attaching` to `dead`: the address is not wanted any more."""


@dataclass(slots=True, eq=False)
class AttachedWorker:
    """One epoch of a worker, and what this router has under way on it.

    Attributes:
        address: Where it was attached to.
        link: The connection.
        sequences: Sequences that this router has placed here.
        tokens: Prompt tokens of those.
    """

    address: str
    link: WorkerLink
    sequences: int = 0
    tokens: int = 0
    _report: WorkerLoad | None = None
    _sequences_when_reported: int = 0
    _tokens_when_reported: int = 0

    @property
    def role(self) -> Role:
        """Which phases it runs."""
        return self.link.description.role

    @property
    def dead(self) -> bool:
        """Whether its engine or connection is gone for good."""
        return self.link.check_health().state is HealthState.DEAD

    def estimate(self) -> int:
        """Load for the policies: prompt tokens to compute on a context worker, sequences on others."""
        report = self.link.load
        if report is not self._report:
            self._report = report
            self._sequences_when_reported = self.sequences
            self._tokens_when_reported = self.tokens
        if self.role is Role.CONTEXT:
            return estimated_load(report.waiting_tokens, self.tokens, self._tokens_when_reported)
        return estimated_load(report.running + report.waiting, self.sequences, self._sequences_when_reported)

    def claim(self, tokens: int) -> "Claim":
        """Count one sequence with `tokens` prompt tokens here, until the claim is released."""
        self.sequences += 1
        self.tokens += tokens
        return Claim(self, tokens)


class Claim(msgspec.Struct, eq=False):
    """One sequence counted on one worker."""

    worker: AttachedWorker
    tokens: int
    released: bool = False

    def release(self) -> None:
        """Count it no longer; safe to call twice."""
        if not self.released:
            self.released = True
            self.worker.sequences -= 1
            self.worker.tokens -= self.tokens


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One address and the worker behind it.

    Attributes:
        address: `tcp://host:port`.
        role: Role that is expected there.
        source: The configured address that it comes from: the same, or a `dns://` name.
        state: See the module.
        worker: The attached epoch, from `live` until its link is closed.
        reason: Why it is not live, for people.
        failures: Tries to attach that failed in a row.
        wanted: False once DNS no longer names the address; the slot then ends with its worker.
    """

    address: str
    role: Role
    source: str
    state: WorkerState = WorkerState.ATTACHING
    worker: AttachedWorker | None = None
    reason: str = "not attached yet"
    failures: int = 0
    wanted: bool = True

    def move(self, state: WorkerState, reason: str = "") -> None:
        """Enter `state`.

        Raises:
            ValueError: `TRANSITIONS` does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"worker {self.address} cannot go from {self.state} to {state}")
        self.state = state
        self.reason = reason

    def attached(self, link: WorkerLink) -> None:
        """A worker answered and fits."""
        self.worker = AttachedWorker(self.address, link)
        self.failures = 0
        self.move(WorkerState.LIVE)

    def refresh(self, suspect_after_s: float) -> WorkerState:
        """Bring the state up to date with the link's health and silence, and return it."""
        if self.worker is not None and self.state is not WorkerState.DEAD:
            state, reason = judge(self.worker.link, suspect_after_s)
            if state is not self.state:
                self.move(state, reason)
        return self.state

    def left(self) -> None:
        """The dead worker's link is closed; try the address again."""
        self.worker = None
        self.move(WorkerState.ATTACHING, self.reason)


_LIVE = (WorkerState.LIVE, "")


def judge(link: WorkerLink, suspect_after_s: float) -> tuple[WorkerState, str]:
    """The state that an attached worker's health and silence speak for, and why.

    Silence for longer still is death, but the link alone declares that: it knows whether it has read all that came.
    """
    health = link.check_health()
    if health.state is HealthState.DEAD:
        return WorkerState.DEAD, health.reason
    silent_s = link.silence_s
    if silent_s >= suspect_after_s:
        return WorkerState.SUSPECT, f"silent for {silent_s:.1f} s"
    return _LIVE
