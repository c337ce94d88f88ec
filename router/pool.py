"""Keeps every configured worker attached: one task an address, one that watches silence, one a `dns://` name.

    for each address, for as long as it is wanted:
        attach --fails or does not fit--> wait with back-off, again
        live/suspect until dead --> close the link, which fails what is pending there --> again, at once at first

Everything runs on one event loop.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass

import structlog

from router.addresses import backoff_s, check_address, is_dns, resolve
from router.workers import AttachedWorker, WorkerLink, WorkerSlot, WorkerState
from twostroke.executor.base import ServedModel
from twostroke.protocol.config import WorkersConfig
from twostroke.protocol.errors import ConfigError, EngineDeadError, TwostrokeError
from twostroke.protocol.worker import Role, WorkerDescription

TICK_S = 0.1
"""How often silence is looked at and waiting requests are tried again."""
RESOLVE_EVERY_S = 5.0
CLOSE_DEADLINE_S = 1.0

Attach = Callable[[str], Awaitable[WorkerLink]]
"""Attaches to the worker at an address, within a deadline; raises `TwostrokeError` or `OSError` where that fails."""

_log = structlog.get_logger(__name__)


class MisfitError(TwostrokeError):
    """A worker answered that cannot serve beside the others: wrong role, model or cache layout."""


@dataclass(frozen=True, slots=True)
class ConfiguredAddress:
    """One entry of the `workers` section."""

    address: str
    role: Role


class WorkerPool:
    """All workers of the router.

    Args:
        config: Whom to attach to. Without context addresses the others must be aggregated workers.
        attach: Makes a link to one address.
        suspect_after_s: A worker silent for so long is suspect.
        on_change: Called on the loop at each tick and whenever a worker was attached or lost.
        on_broken: Called if a task of the pool ends by a bug: the router is not to be trusted any more.
        draw: Randomness of the back-off.

    Raises:
        ConfigError: An address is malformed or listed twice, or there is none in a needed role.
    """

    def __init__(
        self,
        config: WorkersConfig,
        attach: Attach,
        suspect_after_s: float,
        *,
        on_change: Callable[[], None],
        on_broken: Callable[[BaseException], None],
        draw: random.Random | None = None,
    ) -> None:
        self._configured = _configured(config)
        self.roles = _needed_roles(config)
        self._attach = attach
        self._suspect_after_s = suspect_after_s
        self._on_change = on_change
        self._on_broken = on_broken
        self._draw = draw or random.Random()  # noqa: S311 - jitter, not cryptography
        self._slots: dict[str, WorkerSlot] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._model: ServedModel | None = None  # also while nobody is attached, of those before
        self._closed = False

    def start(self) -> None:
        """Begin to attach; on the running loop."""
        for configured in self._configured:
            if is_dns(configured.address):
                self._spawn(self._follow_name(configured))
            else:
                self._add(configured.address, configured.role, configured.address)
        self._spawn(self._watch())

    def slots(self) -> Iterable[WorkerSlot]:
        """Every address, attached or not."""
        return self._slots.values()

    def live(self, role: Role) -> list[AttachedWorker]:
        """Workers of `role` that may get new work, in a stable order; silence is as of the last tick."""
        return self._in_state(role, WorkerState.LIVE)

    def suspect(self, role: Role) -> list[AttachedWorker]:
        """Workers of `role` that had fallen silent at the last tick, but are not given up."""
        return self._in_state(role, WorkerState.SUSPECT)

    def missing_role(self) -> Role | None:
        """A needed role without any attached worker; None when the router can serve.

        A suspect worker counts: requests wait for it. A pause must not take the router out of its load balancer.
        """
        return next((role for role in self.roles if not self.live(role) and not self.suspect(role)), None)

    @property
    def model(self) -> ServedModel:
        """What the attached workers serve; the shortest context length of them.

        Raises:
            EngineDeadError: No worker has ever been attached.
        """
        if self._model is None:
            raise EngineDeadError("no worker has been attached yet, so the model is not known; see /workers")
        return self._model

    async def close(self) -> None:
        """Stop all tasks and close all links; what is pending on them fails. Safe to call twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close_links(CLOSE_DEADLINE_S)

    def close_links(self, deadline_s: float | None) -> None:
        """Close every link now, without ending the tasks."""
        for slot in self._slots.values():
            if slot.worker is not None:
                slot.worker.link.shutdown(deadline_s)

    def _in_state(self, role: Role, state: WorkerState) -> list[AttachedWorker]:
        """Asked for several times a request. One that died since the last tick is in no state that anybody asks for."""
        return [
            worker
            for slot in self._slots.values()
            if slot.state is state and slot.role is role and (worker := slot.worker) is not None and not worker.dead
        ]

    def _attached(self) -> Iterator[AttachedWorker]:
        for slot in self._slots.values():
            if slot.worker is not None and slot.state is not WorkerState.DEAD:
                yield slot.worker

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("worker pool task ended by a bug", exc_info=error)
            self._on_broken(error)

    def _add(self, address: str, role: Role, source: str) -> None:
        slot = WorkerSlot(address, role, source)
        self._slots[address] = slot
        self._spawn(self._keep_attached(slot))

    async def _watch(self) -> None:
        while True:
            for slot in self._slots.values():
                slot.refresh(self._suspect_after_s)
            self._on_change()
            await asyncio.sleep(TICK_S)

    async def _keep_attached(self, slot: WorkerSlot) -> None:
        try:
            while slot.wanted:
                if await self._try_attach(slot):
                    self._on_change()
                    await self._until_dead(slot)
                    self._leave(slot)
                    self._on_change()
                else:
                    await asyncio.sleep(backoff_s(slot.failures, self._draw))
        finally:
            if not self._closed:
                self._slots.pop(slot.address, None)

    async def _try_attach(self, slot: WorkerSlot) -> bool:
        try:
            link = await self._attach(slot.address)
        except Exception as error:  # noqa: BLE001 - whatever it was, the address is tried again
            if not isinstance(error, TwostrokeError | OSError):
                _log.error("attaching broke", address=slot.address, exc_info=error)
            self._attach_failed(slot, str(error))
            return False
        try:
            self._check_fits(slot, link.description)
        except MisfitError as error:
            link.shutdown(CLOSE_DEADLINE_S)
            self._attach_failed(slot, str(error))
            return False
        slot.attached(link)
        self._note_model()
        _log.info("worker attached", address=slot.address, role=str(slot.role), epoch=link.epoch)
        return True

    def _attach_failed(self, slot: WorkerSlot, reason: str) -> None:
        slot.failures += 1
        # The same reason again and again, twelve times a minute, would bury everything else.
        level = _log.debug if slot.reason == reason else _log.warning
        level("worker not attached", address=slot.address, role=str(slot.role), reason=reason)
        slot.reason = reason

    async def _until_dead(self, slot: WorkerSlot) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if slot.refresh(self._suspect_after_s) is WorkerState.DEAD:
                return

    def _leave(self, slot: WorkerSlot) -> None:
        worker = slot.worker
        if worker is not None:
            _log.warning("worker lost", address=slot.address, role=str(slot.role), reason=slot.reason)
            worker.link.shutdown(CLOSE_DEADLINE_S)
        slot.left()
        self._note_model()

    def _note_model(self) -> None:
        """Who is attached has changed."""
        served = [ServedModel.of(worker.link.description) for worker in self._attached()]
        self._model = min(served, key=lambda model: model.max_model_len, default=self._model)

    def _check_fits(self, slot: WorkerSlot, described: WorkerDescription) -> None:
        """See that a worker has the expected role, and model and layout of those attached already."""
        if described.role is not slot.role:
            raise MisfitError(
                f"{slot.address} is a worker of role {described.role}, but the router expects {slot.role} there; "
                "correct workers.context and workers.generation"
            )
        for other in self._attached():
            reference = other.link.description
            if (reference.layout, reference.model) != (described.layout, described.model):
                raise MisfitError(
                    f"{slot.address} serves {described.model!r} with {described.layout}, but {other.address} serves "
                    f"{reference.model!r} with {reference.layout}; all workers must share model and cache layout"
                )

    async def _follow_name(self, configured: ConfiguredAddress) -> None:
        while True:
            try:
                self._name_resolved(configured, await resolve(configured.address))
            except OSError as error:
                _log.warning("worker name not resolved", address=configured.address, reason=str(error))
            await asyncio.sleep(RESOLVE_EVERY_S)

    def _name_resolved(self, configured: ConfiguredAddress, found: list[str]) -> None:
        """Attach to addresses that are new behind the name; those gone end with the worker that is there now."""
        for slot in self._slots.values():
            if slot.source == configured.address:
                slot.wanted = slot.address in found
        for address in found:
            if address not in self._slots:
                self._add(address, configured.role, configured.address)


def _configured(config: WorkersConfig) -> tuple[ConfiguredAddress, ...]:
    expected = Role.GENERATION if config.context else Role.AGGREGATED
    listed = [("workers.context", address, Role.CONTEXT) for address in config.context]
    listed += [("workers.generation", address, expected) for address in config.generation]
    seen = set()
    for setting, address, _ in listed:
        check_address(address, setting)
        if address in seen:
            raise ConfigError(f"{setting}: {address} is listed twice under workers; a worker is attached to once")
        seen.add(address)
    return tuple(ConfiguredAddress(address, role) for _, address, role in listed)


def _needed_roles(config: WorkersConfig) -> tuple[Role, ...]:
    if not config.generation:
        raise ConfigError("workers.generation: the router needs at least one address of a generation worker")
    return (Role.CONTEXT, Role.GENERATION) if config.context else (Role.AGGREGATED,)
