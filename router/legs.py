"""The sinks of each submission to a worker: a leg for each sequence.

    open --output--> open
    open --final output or error--> closed
    open --given up by the request--> closed     (the worker is told, or had never got it)
    closed --anything--> closed                  (late: dropped)

A leg only sorts events; what follows from them is decided in `request_life`.
"""

import asyncio
from typing import Protocol

import structlog

from router.workers import Claim
from twostroke.executor.base import ResultSink
from twostroke.protocol.errors import TwostrokeError, from_info
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import Phase
from twostroke.protocol.responses import SequenceOutput

_log = structlog.get_logger(__name__)


class LegOwner(Protocol):
    """The request that a leg belongs to."""

    def leg_output(self, leg: "Leg", output: SequenceOutput) -> None:
        """`leg` made tokens; if `output` is final, the leg ended well and is closed already."""
        ...

    def leg_failed(self, leg: "Leg", error: TwostrokeError) -> None:
        """`leg` failed, and is closed already."""
        ...


class Leg:
    """What one worker does for one sequence: a `ResultSink` of one submission.

    Args:
        owner: The request.
        client: The sink of the whole sequence.
        phase: The part of the request's life that the worker runs.
        key: Names the sequence, attempt included.
        claim: Counts the sequence on its worker until the leg is closed.

    Attributes:
        loop: Everything of a router lives on this one.
        wake: Resumes the reader of the client's result; see `ResultSink`.
    """

    __slots__ = ("claim", "client", "key", "loop", "open", "owner", "phase", "wake")

    def __init__(self, owner: LegOwner, client: ResultSink, phase: Phase, key: SequenceKey, claim: Claim) -> None:
        self.owner = owner
        self.client = client
        self.phase = phase
        self.key = key
        self.claim = claim
        self.open = True
        self.loop = asyncio.get_running_loop()
        self.wake = client.wake  # called with every batch of outputs: not once more than need be

    def feed(self, output: SequenceOutput) -> None:
        """Take one output; see `ResultSink`."""
        if not self.open:
            return
        if output.error is not None:
            self.fail(from_info(output.error))
            return
        if output.finish_reason is not None:
            self._close()
        self.owner.leg_output(self, output)

    def fail(self, error: TwostrokeError) -> None:
        """End with `error`; see `ResultSink`."""
        if self.open:
            self._close()
            self.owner.leg_failed(self, error)

    def drop(self) -> bool:
        """Close the leg without telling its worker; whether it was open."""
        was_open = self.open
        if was_open:
            self._close()
        return was_open

    def give_up(self) -> None:
        """Close the leg and tell its worker; nothing happens if it is closed already."""
        if self.drop():
            self.abort_at_worker()

    def abort_at_worker(self, *, whole_request: bool = False) -> None:
        """Tell the worker to end the sequence, or its whole request: computation, or leases of a context phase."""
        try:
            self.claim.worker.link.abort_request(self.key.client_id, None if whole_request else self.key.index)
        except TwostrokeError as error:
            # The worker is gone, and with it what should be aborted.
            _log.debug("abort not sent", key=str(self.key), worker=self.claim.worker.address, reason=str(error))

    def _close(self) -> None:
        self.open = False
        self.claim.release()
