"""The generation role's part of a request's life: reserve, fetch, adopt.

    the engine reserves blocks          --> fetch: the context worker is asked to write them, while the next step runs
    FetchEnded: done                    --> the engine adopts the sequence and decodes
    FetchEnded: otherwise               --> the request fails with the reason; its blocks are free, or quarantined
    BlocksSafe                          --> quarantined blocks are free
    abort, deadline, lost frontend      --> the fetch is cancelled; FetchEnded follows

A transfer is named by the engine's request id, which is never used twice in an epoch. If the prefix cache held every
block, the fetch is empty and only ends the context worker's lease.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from kvtransfer.events import BlocksSafe, FetchEnded, TransferEvent, TransferOutcome
from twostroke.engine.engine import Engine
from twostroke.engine.handover import Reservation
from twostroke.protocol.durations import DurationHistogram, HandoverPart, HandoverTimes, copy_times
from twostroke.protocol.errors import InvalidRequestError, TransferError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.transfer import TRANSFER_VERSION, ContextPhaseParams, LayoutFingerprint, TransferHandle
from twostroke.protocol.worker import Role
from twostroke.worker.role_part import TransferCounts, require_phase

_READER_PARTS = (HandoverPart.RESERVE, HandoverPart.TRANSFER, HandoverPart.FIRST_STEP)


class FetchAgent(Protocol):
    """What this role needs of `kvtransfer`'s agent."""

    def fetch(
        self,
        transfer_id: int,
        handle: TransferHandle,
        positions: Sequence[int],
        blocks: Sequence[int],
        deadline_s: float,
    ) -> None:
        """Ask the context worker to write its blocks number `positions` into our `blocks`."""

    def cancel(self, transfer_id: int) -> None:
        """Give a fetch up; `FetchEnded` follows."""

    def poll(self) -> list[TransferEvent]:
        """What happened since the last call."""
        ...

    def close(self, deadline_s: float) -> None:
        """End everything."""


class GenerationPart:
    """See the module.

    Args:
        engine: The worker's engine.
        agent: Fetches the blocks.
        timeout_s: A transfer that takes longer fails.
    """

    def __init__(self, engine: Engine, agent: FetchAgent, timeout_s: float) -> None:
        self._engine = engine
        self._agent = agent
        self._timeout_s = timeout_s
        self._keys: dict[int, SequenceKey] = {}
        self._transfer_ids: dict[SequenceKey, int] = {}
        self._times: HandoverTimes = {part: DurationHistogram() for part in _READER_PARTS}
        self._transfers = TransferCounts()
        self._fetched_at: dict[int, float] = {}
        self._landed_at: list[float] = []
        self._log = structlog.get_logger(__name__)

    @property
    def transfers(self) -> TransferCounts:
        """Fetches that landed, and those that ended otherwise."""
        return dataclasses.replace(self._transfers, times=copy_times(self._times))

    def check(self, request: GenerationRequest) -> None:
        """Take over what fits this worker's cache, and run whole requests (a resume without a context worker)."""
        require_phase(request, Role.GENERATION, Phase.GENERATION_ONLY, Phase.FULL)
        if request.context_phase_params is not None:
            _check_params(request.context_phase_params, self._engine.facts.layout)

    def before_step(self) -> None:
        """Tell the engine which transfers have landed or failed, and fetch what there is room for now."""
        for event in self._agent.poll():
            if isinstance(event, FetchEnded):
                self._end_fetch(event)
            elif isinstance(event, BlocksSafe):
                self._engine.release_quarantine(self._forget(event.transfer_id))
        self._engine.admit()
        self._fetch_reserved()

    def after_step(self) -> list[SequenceOutput]:
        """Cancel what was given up, and fetch what the step reserved blocks for."""
        for key in self._engine.take_cancellations():
            self._agent.cancel(self._transfer_ids[key])
        self._fetch_reserved()
        now = time.monotonic()
        for landed_at in self._landed_at:  # their sequences were in the step, if there was room
            self._times[HandoverPart.FIRST_STEP].observe(now - landed_at)
        self._landed_at.clear()
        return []

    def close(self, deadline_s: float) -> None:
        """Give all transfers up."""
        self._agent.close(deadline_s)

    def _fetch_reserved(self) -> None:
        for reservation in self._engine.take_reservations():
            self._fetch(reservation)

    def _fetch(self, reservation: Reservation) -> None:
        transfer_id = reservation.request_id
        self._keys[transfer_id] = reservation.key
        self._transfer_ids[reservation.key] = transfer_id
        self._times[HandoverPart.RESERVE].observe(reservation.waited_s)
        self._fetched_at[transfer_id] = time.monotonic()
        self._agent.fetch(transfer_id, reservation.handle, reservation.positions, reservation.blocks, self._timeout_s)

    def _end_fetch(self, event: FetchEnded) -> None:
        done = event.outcome is TransferOutcome.DONE
        key = self._keys[event.transfer_id]
        self._count(event, done=done)
        fetched_at = self._fetched_at.pop(event.transfer_id)
        if done:
            self._landed_at.append(time.monotonic())
            self._times[HandoverPart.TRANSFER].observe(self._landed_at[-1] - fetched_at)
            self._engine.adopt(self._forget(event.transfer_id))
            return
        # Clients that leave are everyday life; an expiry or a failure is not.
        level = self._log.debug if event.outcome is TransferOutcome.CANCELLED else self._log.warning
        level("KV transfer failed", key=str(key), outcome=event.outcome.value, reason=event.reason)
        error = TransferError(f"the KV cache of sequence {key} did not arrive ({event.outcome.value}): {event.reason}")
        self._engine.fail_reservation(key, error, blocks_safe=event.blocks_safe)
        if event.blocks_safe:
            self._forget(event.transfer_id)

    def _forget(self, transfer_id: int) -> SequenceKey:
        key = self._keys.pop(transfer_id)
        del self._transfer_ids[key]
        return key

    def _count(self, event: FetchEnded, *, done: bool) -> None:
        moved = event.count * self._engine.facts.block_bytes if done else 0
        self._transfers = TransferCounts(
            done=self._transfers.done + done,
            failed=self._transfers.failed + (not done),
            nbytes=self._transfers.nbytes + moved,
        )


def _check_params(params: ContextPhaseParams, layout: LayoutFingerprint) -> None:
    """Refuse a cache that cannot be ours.

    Raises:
        InvalidRequestError: With both versions or both fingerprints.
    """
    if params.version != TRANSFER_VERSION:
        raise InvalidRequestError(
            f"the context worker speaks transfer version {params.version}, this worker version {TRANSFER_VERSION}",
            "context_phase_params",
        )
    if params.handle.layout != layout:
        raise InvalidRequestError(
            f"KV layouts differ: the context worker has {params.handle.layout}, this worker has {layout}; "
            "serve the same model, dtype and block size in both roles",
            "context_phase_params",
        )
