"""The life of one supervised part, as a state machine without I/O.

planned --spawned--> starting --loading--> loading --answered--> ready
                        |          |          |                    |
                        +----------+----------+------- died -------+
                                              |
                    restarting <--------------+----> failed        (see `after_exit`)
                        |
                        +--spawned--> starting ...

stop: planned, restarting -> stopped; starting, loading, ready -> stopping --died--> stopped
"""

import enum
from dataclasses import dataclass, field

from twostroke.cli.errors import EXIT_WRONG_CONFIG

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
STEADY_AFTER_S = 30.0
STARTS_BEFORE_GIVING_UP = 3


class PartState(enum.StrEnum):
    """Where a part is in its life."""

    PLANNED = "planned"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class PartEvent(enum.StrEnum):
    """What can happen to a part."""

    SPAWNED = "spawned"
    LOADING = "loading"
    ANSWERED = "answered"
    DIED = "died"
    GAVE_UP = "gave up"
    STOP = "stop"


_S, _E = PartState, PartEvent
TRANSITIONS: dict[tuple[PartState, PartEvent], PartState] = {
    (_S.PLANNED, _E.SPAWNED): _S.STARTING,
    (_S.PLANNED, _E.STOP): _S.STOPPED,
    (_S.STARTING, _E.LOADING): _S.LOADING,
    (_S.STARTING, _E.ANSWERED): _S.READY,
    (_S.STARTING, _E.DIED): _S.RESTARTING,
    (_S.STARTING, _E.GAVE_UP): _S.FAILED,
    (_S.STARTING, _E.STOP): _S.STOPPING,
    (_S.LOADING, _E.LOADING): _S.LOADING,
    (_S.LOADING, _E.ANSWERED): _S.READY,
    (_S.LOADING, _E.DIED): _S.RESTARTING,
    (_S.LOADING, _E.GAVE_UP): _S.FAILED,
    (_S.LOADING, _E.STOP): _S.STOPPING,
    (_S.READY, _E.LOADING): _S.READY,  # the server lives on while its world starts anew
    (_S.READY, _E.ANSWERED): _S.READY,
    (_S.READY, _E.DIED): _S.RESTARTING,
    (_S.READY, _E.GAVE_UP): _S.FAILED,
    (_S.READY, _E.STOP): _S.STOPPING,
    (_S.RESTARTING, _E.SPAWNED): _S.STARTING,
    (_S.RESTARTING, _E.STOP): _S.STOPPED,
    (_S.STOPPING, _E.LOADING): _S.STOPPING,
    (_S.STOPPING, _E.ANSWERED): _S.STOPPING,
    (_S.STOPPING, _E.DIED): _S.STOPPED,
    (_S.STOPPING, _E.STOP): _S.STOPPING,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
    (_S.FAILED, _E.STOP): _S.FAILED,
}


class IllegalMoveError(RuntimeError):
    """An event that the part's state does not allow: a bug of the supervisor."""


@dataclass
class PartLife:
    """State and history of one part.

    Attributes:
        state: Where it is now.
        was_ready: It answered at least once, so its settings work.
        failures: Deaths since its last long run; they set the back-off.
    """

    state: PartState = PartState.PLANNED
    was_ready: bool = field(default=False, init=False)
    failures: int = field(default=0, init=False)

    def move(self, event: PartEvent) -> PartState:
        """Take one transition.

        Raises:
            IllegalMoveError: The table has none for this state and event.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalMoveError(f"a part that is {self.state} cannot take `{event}`")
        if event is PartEvent.ANSWERED:
            self.was_ready = True
        elif event is PartEvent.DIED:
            self.failures += 1
        self.state = following
        return following

    def forgive(self, ready_for_s: float) -> None:
        """Forget earlier deaths after a long run: the part was well, whatever ended it now."""
        if ready_for_s >= STEADY_AFTER_S:
            self.failures = 0

    def after_exit(self, code: int) -> PartEvent:
        """What an exit that nobody asked for means: another start, or the end of `up`.

        A part whose settings are wrong, or that dies three times before it ever answered, will not get better.
        """
        if self.state is PartState.STOPPING:
            return PartEvent.DIED
        hopeless = not self.was_ready and (code == EXIT_WRONG_CONFIG or self.failures + 1 >= STARTS_BEFORE_GIVING_UP)
        return PartEvent.GAVE_UP if hopeless else PartEvent.DIED

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: 0.5 s, doubling to 10 s until the part has run well for 30 s."""
        return min(FIRST_DELAY_S * 2.0 ** max(self.failures - 1, 0), LONGEST_DELAY_S)
