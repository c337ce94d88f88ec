"""Holds fetches back until the device is done with their blocks, without I/O.

    admit --fence reached-----------------> ready: the book takes it, as if it came now
          --cancel------------------------> FetchEnded(cancelled, blocks_safe=True)
          --deadline----------------------> FetchEnded(expired, blocks_safe=True)

Nobody was asked to write yet, so the blocks are safe in each of these ends. The lease that it would have read is not
told; it ends by its own expiry, or by the abort that reaches its worker too.
"""

from kvtransfer.counters import TransferCounters
from kvtransfer.device import StepFence
from kvtransfer.events import FetchEnded, TransferOutcome
from kvtransfer.receiver import Fetch


class FetchGate:
    """The fetches of one worker whose blocks a queued step may still use.

    Args:
        counters: Ends are counted into.
    """

    def __init__(self, counters: TransferCounters) -> None:
        self._counters = counters
        self._held: dict[int, tuple[Fetch, StepFence]] = {}

    @property
    def held(self) -> int:
        """Fetches that wait here."""
        return len(self._held)

    def admit(self, fetch: Fetch, fence: StepFence) -> None:
        """Hold a fetch until `fence` is reached."""
        self._held[fetch.transfer_id] = (fetch, fence)

    def release(self) -> list[Fetch]:
        """The fetches whose fence is reached, in order of their admission; they are held no longer."""
        ready = [fetch for fetch, fence in self._held.values() if fence.reached()]
        for fetch in ready:
            del self._held[fetch.transfer_id]
        return ready

    def cancel(self, transfer_id: int) -> FetchEnded | None:
        """Give a held fetch up; None if it is not held."""
        if transfer_id not in self._held:
            return None
        return self._end(transfer_id, TransferOutcome.CANCELLED, "cancelled before its blocks were free")

    def cancel_all(self) -> list[FetchEnded]:
        """Give every held fetch up."""
        return [ended for transfer_id in list(self._held) if (ended := self.cancel(transfer_id))]

    def tick(self, now: float) -> list[FetchEnded]:
        """End what is overdue."""
        overdue = [fetch for fetch, _ in self._held.values() if now >= fetch.deadline]
        return [
            self._end(
                fetch.transfer_id,
                TransferOutcome.EXPIRED,
                f"the device was not done with the blocks after {fetch.deadline_s} s",
            )
            for fetch in overdue
        ]

    def _end(self, transfer_id: int, outcome: TransferOutcome, reason: str) -> FetchEnded:
        del self._held[transfer_id]
        self._counters.fetches[outcome] += 1
        return FetchEnded(transfer_id, outcome, blocks_safe=True, reason=reason)
