"""Which sequences have run out of time."""

import heapq


class Deadlines:
    """Deadlines by request id, the next one at hand. Entries of ended sequences are dropped, so it stays small."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    @property
    def next(self) -> float | None:
        """The earliest deadline; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def set(self, request_id: int, at: float) -> None:
        """The sequence must have ended by `at`."""
        self._at[request_id] = at
        heapq.heappush(self._heap, (at, request_id))

    def drop(self, request_id: int) -> None:
        """The sequence ended, or has none."""
        if self._at.pop(request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._at):
            self._heap = [(at, known) for known, at in self._at.items()]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1] not in self._at:
            heapq.heappop(self._heap)

    def pop_overdue(self, now: float) -> int | None:
        """Take out the sequence whose deadline passed first; None if no deadline has passed."""
        if not self._heap or self._heap[0][0] > now:
            return None
        request_id = self._heap[0][1]
        self.drop(request_id)
        return request_id
