"""The requests that a frontend serves now: their bound, and how the stop ends them.

open --stop_admitting()--> stopping     (new requests get 503, running ones go on)
fail_pending(): every running result fails, so that each client gets its one final event
"""

from collections.abc import Sequence
from typing import Self

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.result import GenerationResult
from twostroke.frontend.errors import ApiError, Kind
from twostroke.protocol.errors import OverloadedError, TwostrokeError

STOPPING = "this server is shutting down; send the request again"


class InFlight:
    """Knows every request of one frontend. Used on its event loop only.

    Args:
        executor: Told to abort what `fail_pending` ends.
        limit: Choices at the same time at most.
    """

    def __init__(self, executor: GenerationExecutor, limit: int) -> None:
        self._executor = executor
        self._limit = limit
        self._admitted = 0
        self._results: set[GenerationResult] = set()
        self.stopping = False

    def slot(self) -> "Slot":
        """A context that holds one of the limited places, one a choice, for the time of a request.

        Entering it raises:
            OverloadedError: The frontend stops (503).
            ApiError: None is left (429).
        """
        return Slot(self)

    def admit(self, places: int) -> None:
        """Take places; errors as `slot`. `leave` gives them back."""
        if self.stopping:
            raise OverloadedError(STOPPING)
        if self._admitted + places > self._limit:
            message = (
                f"{self._admitted} choices are in flight already and the limit is {self._limit}: "
                f"no room for {places} more; try again soon"
            )
            raise ApiError(Kind.OVER_LIMIT, message, code="too_many_requests")
        self._admitted += places

    def leave(self, places: int) -> None:
        """Give places back."""
        self._admitted -= places

    def track(self, results: Sequence[GenerationResult]) -> None:
        """Let `fail_pending` reach `results`, until `untrack`."""
        self._results.update(results)

    def untrack(self, results: Sequence[GenerationResult]) -> None:
        """The request of these results has its answer; those that still run are aborted."""
        self._results.difference_update(results)
        for client_id in dict.fromkeys([result.key.client_id for result in results if not result.done]):
            self._executor.abort_request(client_id)

    def stop_admitting(self) -> None:
        """Refuse new requests from now on."""
        self.stopping = True

    def fail_pending(self) -> None:
        """End every running request with an error that asks the client to try again."""
        self.end(list(self._results), OverloadedError(STOPPING))

    def end(self, results: Sequence[GenerationResult], error: TwostrokeError) -> None:
        """Fail whole requests with `error` and take their work from the engine."""
        running = [result for result in results if not result.done]
        # All of them first: an abort of the request would tell them of nothing but itself.
        for result in running:
            result.fail(error)
            result.wake()
        for client_id in dict.fromkeys(result.key.client_id for result in running):
            self._executor.abort_request(client_id)


class Slot:
    """See `InFlight.slot`. A class: entering and leaving it takes a third of what a generator takes.

    Args:
        in_flight: Where the places are.
    """

    __slots__ = ("_in_flight", "_places")

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._places = 0

    def __enter__(self) -> Self:
        self.widen(1)
        return self

    def widen(self, places: int) -> None:
        """Hold so many places in all; errors as on entering, which change nothing."""
        if places > self._places:
            self._in_flight.admit(places - self._places)
            self._places = places

    def __exit__(self, *_: object) -> None:
        self._in_flight.leave(self._places)
