"""Places requests on workers, and keeps those that must wait in one bounded queue.

    all needed roles have a worker that takes work        -> placed at once
    else, some worker is only suspect, or full of leases  -> waits, first come first served, up to MAX_WAIT_S
    else (nothing attached)                               -> refused: 503, the client may try again

Waiting requests are tried again at every tick of the pool and whenever a worker comes or goes.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from router.policy import Policy, make_policy
from router.pool import WorkerPool
from router.workers import AttachedWorker, Claim
from twostroke.protocol.config import RouterConfig
from twostroke.protocol.errors import OverloadedError
from twostroke.protocol.worker import Role

MAX_WAIT_S = 30.0
"""A request that no worker took for so long is refused."""


class Placement(msgspec.Struct, frozen=True):
    """The workers of one attempt.

    Attributes:
        context: Where the context phase runs; None if `generation` is an aggregated worker that runs both.
        generation: Where the generation phase runs.
    """

    context: Claim | None
    generation: Claim


class Placeable(Protocol):
    """A request that wants workers."""

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        ...

    @property
    def refused_by(self) -> Collection[AttachedWorker]:
        """Workers that failed it before, and are not asked again."""
        ...

    def begin(self, placement: Placement) -> None:
        """Run on these workers; the claims are the request's now."""
        ...

    def not_placed(self, error: OverloadedError) -> None:
        """No worker took it after it had been waiting."""
        ...


class Dispatcher:
    """Chooses workers by policy.

    Args:
        pool: The workers.
        config: Policies and the bound of the queue.
        clock: Monotonic seconds.
    """

    def __init__(self, pool: WorkerPool, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._max_queued = config.max_queued
        self._clock = clock
        self._policies: Mapping[Role, Policy] = {
            Role.CONTEXT: make_policy(config.policy.context),
            Role.GENERATION: make_policy(config.policy.generation),
            Role.AGGREGATED: make_policy(config.policy.generation),
        }
        self._waiting: dict[Placeable, float] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self._waiting)

    def check_room(self) -> None:
        """See that a new request could be placed or may wait.

        Raises:
            OverloadedError: No worker in a needed role, or the queue is full.
        """
        self._roles_take()
        if len(self._waiting) >= self._max_queued:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait for a worker already (router.max_queued); try again later"
            )

    def admit(self, prompt_tokens: int, refused_by: Collection[AttachedWorker] = ()) -> Placement | None:
        """Workers for a request, or None if it may wait for some. Nobody overtakes those that wait already.

        Raises:
            OverloadedError: As `check_room`.
        """
        # The next tick serves those that wait in order.
        placement = None if self._waiting else self._place(prompt_tokens, refused_by)
        if placement is None:
            self.check_room()
        return placement

    def dispatch(self, request: Placeable) -> None:
        """Place `request`, or let it wait.

        Raises:
            OverloadedError: No worker will take it; it does not wait.
        """
        placement = self.admit(request.prompt_tokens, request.refused_by)
        if placement is not None:
            request.begin(placement)
        else:
            self._waiting[request] = self._clock()

    def forget(self, request: Placeable) -> None:
        """Stop waiting for a worker."""
        self._waiting.pop(request, None)

    def pump(self) -> None:
        """Place the requests that can be placed now; refuse those that waited too long or in vain."""
        self._refuse_late()
        if not self._waiting:
            return
        try:
            if not self._roles_take():
                return
        except OverloadedError as error:
            for request in list(self._waiting):
                self._refuse(request, error)
            return
        for request in list(self._waiting):
            if request in self._waiting:  # it may have ended while another one was placed
                self._try_waiting(request)

    def claim_generation(
        self, planned: Claim | None, prompt_tokens: int, refused_by: Collection[AttachedWorker]
    ) -> Claim:
        """The generation worker to hand over to: `planned` if it is still live, else another.

        Raises:
            OverloadedError: There is no live one that has not refused.
        """
        live = _others(self._pool.live(Role.GENERATION), refused_by)
        if planned is not None:
            if planned.worker in live:
                return planned
            planned.release()
        if not live:
            raise OverloadedError("no generation worker can take the request over; try again later")
        # One that does not admit new work is better than none: the context phase is paid for already.
        return self._choose(_admitting(live) or live).claim(prompt_tokens)

    def _try_waiting(self, request: Placeable) -> None:
        try:
            placement = self._place(request.prompt_tokens, request.refused_by)
        except OverloadedError as error:
            self._refuse(request, error)
            return
        if placement is not None:
            self.forget(request)
            request.begin(placement)

    def _refuse(self, request: Placeable, error: OverloadedError) -> None:
        if request in self._waiting:
            self.forget(request)
            request.not_placed(error)

    def _refuse_late(self) -> None:
        """The queue is in order of arrival, so the late ones stand in front."""
        latest_s = self._clock() - MAX_WAIT_S
        late = list(itertools.takewhile(lambda request: self._waiting[request] <= latest_s, self._waiting))
        for request in late:
            self._refuse(request, OverloadedError(f"no worker could take the request within {MAX_WAIT_S:g} s"))

    def _place(self, prompt_tokens: int, refused_by: Collection[AttachedWorker]) -> Placement | None:
        """Workers for a request; None if it should wait.

        Raises:
            OverloadedError: Waiting is in vain.
        """
        takers = [self._takers(role, refused_by) for role in self._pool.roles]
        if not all(takers):
            return None
        claims = [self._choose(workers).claim(prompt_tokens) for workers in takers]
        return Placement(claims[0] if len(claims) > 1 else None, claims[-1])

    def _roles_take(self) -> bool:
        """Whether every needed role has a worker that takes work now; errors as `_takers`."""
        takers = [self._takers(role, ()) for role in self._pool.roles]  # all of them: each may raise
        return all(takers)

    def _takers(self, role: Role, refused_by: Collection[AttachedWorker]) -> list[AttachedWorker]:
        """Workers of `role` that take work now; none if some may do so soon.

        Raises:
            OverloadedError: None will.
        """
        live = _others(self._pool.live(role), refused_by)
        if not live and all(worker in refused_by for worker in self._pool.suspect(role)):
            raise OverloadedError(f"no {role} worker can take the request; try again later")
        return _admitting(live)

    def _choose(self, workers: Sequence[AttachedWorker]) -> AttachedWorker:
        """One of several workers of one role."""
        if len(workers) == 1:
            return workers[0]
        return workers[self._policies[workers[0].role].choose([worker.estimate() for worker in workers])]


def _others(workers: Sequence[AttachedWorker], refused_by: Collection[AttachedWorker]) -> Sequence[AttachedWorker]:
    return [worker for worker in workers if worker not in refused_by] if refused_by else workers


def _admitting(workers: Sequence[AttachedWorker]) -> list[AttachedWorker]:
    return [worker for worker in workers if worker.link.load.admitting]
