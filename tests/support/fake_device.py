"""A device whose steps end when a test says so."""

import threading
import time


class FakeFence:
    """Not reached until `pass_`ed; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False
        self._passed = threading.Event()

    def reached(self) -> bool:
        """Whether the test has let it pass."""
        self.asked += 1
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self._passed.is_set()

    def pass_(self) -> None:
        """All work before the fence has ended."""
        self._passed.set()

    def wait_until_asked(self, times: int = 5, timeout_s: float = 20.0) -> None:
        """Return once the transfer thread has asked so many more times: it knows that it must wait."""
        wanted = self.asked + times
        deadline = time.monotonic() + timeout_s
        while self.asked < wanted:
            assert time.monotonic() < deadline, f"asked {self.asked} times, expected {wanted}"
            time.sleep(0.001)


class FakeDevice:
    """Hands a fence out for each offer or fetch, in order.

    Attributes:
        fences: Those handed out so far.
        threads: Names of the threads that entered.
    """

    def __init__(self) -> None:
        self.fences: list[FakeFence] = []
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        """Remember who came."""
        self.threads.append(threading.current_thread().name)

    def mark(self) -> FakeFence:
        """A new fence."""
        self.fences.append(FakeFence())
        return self.fences[-1]
