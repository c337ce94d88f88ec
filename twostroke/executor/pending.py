"""The pending results of one executor: who waits for which sequence, until each has had its one final event.

    alive --register, deliver, abort--> alive
    alive --fail_all(error)--> dead     (first error wins; it is recorded, everything pending gets it)

Safe to use from any thread. Sinks are called outside the lock; their loops are woken once a batch.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from twostroke.executor.base import ResultSink
from twostroke.protocol.errors import AbortedError, EngineDeadError, TwostrokeError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.responses import SequenceOutput

log = structlog.get_logger(__name__)


class PendingResults:
    """Maps sequence keys to the sinks that wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: dict[SequenceKey, ResultSink] = {}
        self._keys: dict[int, list[SequenceKey]] = {}
        self._error: EngineDeadError | None = None

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def error(self) -> EngineDeadError | None:
        """The first fatal error, or None while alive."""
        return self._error

    def require_alive(self) -> None:
        """Check that no fatal error happened.

        Raises:
            EngineDeadError: One did; this is a copy of it, so that each caller has a traceback of its own.
        """
        if self._error is not None:
            raise EngineDeadError(str(self._error))

    def submit(self, sinks: Mapping[SequenceKey, ResultSink], send: Callable[[], None]) -> None:
        """Register all `sinks` of one request, then `send`; death is checked before and after registering.

        If the check or the send fails, the entries leave and the error is the caller's, unless all sinks had their
        final event in the meantime: then there is nothing left to tell.

        Raises:
            EngineDeadError: The executor is dead.
            ValueError: A key is registered already; none of them is then registered by this call.
        """
        self._register(sinks)
        try:
            self.require_alive()
            send()
        except BaseException as error:
            if self._withdraw(sinks) or not isinstance(error, TwostrokeError):
                raise

    def _register(self, sinks: Mapping[SequenceKey, ResultSink]) -> None:
        with self._lock:
            self.require_alive()
            for key in sinks:
                if key in self._sinks:
                    raise ValueError(f"sequence {key} is pending already; a retry needs another attempt number")
            for key, sink in sinks.items():
                self._sinks[key] = sink
                self._keys.setdefault(key.client_id, []).append(key)

    def _withdraw(self, keys: Iterable[SequenceKey]) -> bool:
        """Remove the entries that are still there; whether any was."""
        with self._lock:
            taken = [self._take(key) for key in keys]
        return any(sink is not None for sink in taken)

    def _take(self, key: SequenceKey) -> ResultSink | None:
        """Remove one entry; with the lock held."""
        sink = self._sinks.pop(key, None)
        if sink is not None:
            keys = self._keys[key.client_id]
            keys.remove(key)
            if not keys:
                del self._keys[key.client_id]
        return sink

    def deliver(self, outputs: Sequence[SequenceOutput]) -> int:
        """Feed each output to its sink; returns how many had none and were dropped."""
        fed: list[tuple[ResultSink, SequenceOutput]] = []
        with self._lock:
            for output in outputs:
                key = output.key
                final = output.finish_reason is not None or output.error is not None
                sink = self._take(key) if final else self._sinks.get(key)
                if sink is not None:
                    fed.append((sink, output))
        for sink, output in fed:
            sink.feed(output)
        _wake([sink for sink, _ in fed])
        return len(outputs) - len(fed)

    def abort(self, client_id: int, index: int | None) -> None:
        """End the pending sequences of a request, or one index of it, with `AbortedError`."""
        with self._lock:
            keys = [key for key in self._keys.get(client_id, ()) if index is None or key.index == index]
            sinks = [sink for key in keys if (sink := self._take(key)) is not None]
        self._fail(sinks, lambda: AbortedError(f"request {client_id:016x} was aborted"))

    def fail_all(self, error: EngineDeadError) -> bool:
        """Record the executor's death and end everything pending; False, and nothing else, if it was dead already."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            sinks = list(self._sinks.values())
            self._sinks.clear()
            self._keys.clear()
        self._fail(sinks, lambda: EngineDeadError(str(error)))
        return True

    def client_ids(self) -> list[int]:
        """The requests that have pending sequences."""
        with self._lock:
            return list(self._keys)

    @staticmethod
    def _fail(sinks: list[ResultSink], error: Callable[[], TwostrokeError]) -> None:
        for sink in sinks:
            try:
                sink.fail(error())
            except Exception:
                log.exception("a sink broke while it was told of its end")  # the others are still to be told
        _wake(sinks)


def _wake(sinks: Iterable[ResultSink]) -> None:
    """Wake all sinks, with one call into each other loop that somebody awaits on."""
    try:
        current = asyncio.get_running_loop()
    except RuntimeError:
        current = None
    elsewhere: dict[asyncio.AbstractEventLoop, dict[ResultSink, None]] = {}
    for sink in sinks:
        loop = sink.loop
        if loop is None:
            continue
        if loop is current:
            sink.wake()
        else:
            elsewhere.setdefault(loop, {})[sink] = None
    for loop, woken in elsewhere.items():
        try:
            loop.call_soon_threadsafe(_wake_all, woken)
        except RuntimeError:
            log.debug("a reader's loop is closed", readers=len(woken))


def _wake_all(sinks: Iterable[ResultSink]) -> None:
    for sink in sinks:
        sink.wake()
