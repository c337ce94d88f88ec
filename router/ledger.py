"""The ledger: one entry for each request that the router took, with the phase of its life.

    queued --> context --> handoff --> generation --> done
      ^          |  |         |             |
      |          |  +---------|-------------+  (aggregated workers: the first token comes from the worker that goes on)
      +----------+            |
       (context phase placed  |
        again elsewhere)      v
    every open phase ------> failed | cancelled;   context also --> done (the first token ended the request)

`queued` waits for workers, `context` makes the first token, `handoff` moves the KV cache until the generation worker's
first token, `generation` makes the rest. Pure: the clock is given, nothing here does I/O. Used on one event loop only.
"""

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import msgspec

HISTORY = 1000
"""Ended entries that are kept for people to look at."""


class LedgerPhase(enum.StrEnum):
    """Where a request stands. `CANCELLED`: its frontend gave it up, since the client left."""

    QUEUED = "queued"
    CONTEXT = "context"
    HANDOFF = "handoff"
    GENERATION = "generation"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({LedgerPhase.DONE, LedgerPhase.FAILED, LedgerPhase.CANCELLED})
"""Phases that nothing follows."""

_GIVEN_UP = frozenset({LedgerPhase.FAILED, LedgerPhase.CANCELLED})

TRANSITIONS: Mapping[LedgerPhase, frozenset[LedgerPhase]] = MappingProxyType(
    {
        LedgerPhase.QUEUED: _GIVEN_UP | {LedgerPhase.CONTEXT},
        LedgerPhase.CONTEXT: _GIVEN_UP
        | {LedgerPhase.QUEUED, LedgerPhase.HANDOFF, LedgerPhase.GENERATION, LedgerPhase.DONE},
        LedgerPhase.HANDOFF: _GIVEN_UP | {LedgerPhase.GENERATION, LedgerPhase.DONE},
        LedgerPhase.GENERATION: _GIVEN_UP | {LedgerPhase.DONE},
        LedgerPhase.DONE: frozenset(),
        LedgerPhase.FAILED: frozenset(),
        LedgerPhase.CANCELLED: frozenset(),
    }
)
"""Which phases may follow each. `handoff` to `done`: the generation worker's one message was first and last."""


class PhaseMove(msgspec.Struct, frozen=True, gc=False):
    """A phase and when it was entered, in seconds of the ledger's clock."""

    phase: LedgerPhase
    at_s: float


class LedgerEntry(msgspec.Struct, eq=False):
    """One request.

    Attributes:
        client_id: Its name everywhere.
        prompt_tokens: Length of the prompt.
        n: How many sequences it is for. The phase is that of the one that is furthest; at the end FAILED if any failed,
            else CANCELLED if any was given up.
        moves: Every phase so far, in order, with the time of entering it; the last is the present one.
        attempt: How often its context phase was placed before.
        context_worker: Address of the worker of the context phase; None before it is placed, or if one aggregated
            worker runs both phases.
        generation_worker: Address of the worker of the generation phase; of several sequences, of the one that was
            placed last.
        output_tokens: Tokens that the client got; set at the end.
        cached_tokens: Prompt tokens that the context worker found in its prefix cache.
        error: What the client was told, if the request failed.
    """

    client_id: int
    prompt_tokens: int
    n: int = 1
    moves: list[PhaseMove] = msgspec.field(default_factory=list)
    attempt: int = 0
    context_worker: str | None = None
    generation_worker: str | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def phase(self) -> LedgerPhase:
        """Where the request stands."""
        return self.moves[-1].phase

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return self.phase in ENDED

    @property
    def opened_s(self) -> float:
        """When the entry was opened."""
        return self.moves[0].at_s

    @property
    def phase_since_s(self) -> float:
        """When the present phase was entered."""
        return self.moves[-1].at_s


class Ledger:
    """All open entries, and the last ones that ended.

    Args:
        clock: Monotonic seconds. (An event loop's own clock may be as coarse as a millisecond.)
        history: Ended entries kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, history: int = HISTORY) -> None:
        self._clock = clock
        self._open: dict[int, LedgerEntry] = {}
        self._ended: deque[LedgerEntry] = deque(maxlen=history)
        self._ended_counts: Counter[LedgerPhase] = Counter()

    def open(self, client_id: int, prompt_tokens: int, n: int = 1) -> LedgerEntry:
        """Start an entry in `queued`.

        Raises:
            ValueError: `client_id` has an open entry.
        """
        if client_id in self._open:
            raise ValueError(f"client id {client_id:016x} is in the ledger already")
        entry = LedgerEntry(client_id, prompt_tokens, n, [PhaseMove(LedgerPhase.QUEUED, self._clock())])
        self._open[client_id] = entry
        return entry

    def move(self, entry: LedgerEntry, phase: LedgerPhase) -> float:
        """Enter `phase`; an ended entry goes to the history. Returns the seconds spent in the phase before.

        Raises:
            ValueError: `TRANSITIONS` does not allow it.
        """
        before = entry.moves[-1]
        if phase not in TRANSITIONS[before.phase]:
            raise ValueError(f"request {entry.client_id:016x} cannot go from {before.phase} to {phase}")
        now = self._clock()
        spent_s = now - before.at_s
        entry.moves.append(PhaseMove(phase, now))
        if phase in ENDED:
            del self._open[entry.client_id]
            self._ended.append(entry)
            self._ended_counts[phase] += 1
        return spent_s

    def now(self) -> float:
        """Seconds of the ledger's clock."""
        return self._clock()

    def open_entries(self) -> Iterator[LedgerEntry]:
        """Entries that have not ended, oldest first."""
        return iter(self._open.values())

    def ended_entries(self) -> Iterator[LedgerEntry]:
        """The last entries that ended, latest first."""
        return reversed(self._ended)

    def open_counts(self) -> Counter[LedgerPhase]:
        """Open entries by phase."""
        return Counter(entry.phase for entry in self._open.values())

    def ended_counts(self) -> Counter[LedgerPhase]:
        """Entries that ever ended, by how."""
        return Counter(self._ended_counts)

    def __len__(self) -> int:
        return len(self._open)
