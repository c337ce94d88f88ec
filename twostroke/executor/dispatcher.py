"""The dispatch thread of an `IpcExecutor`: all that goes to the worker leaves from here, in order.

idle --first put--> running --close--> ended
                    running --crash--> ended (`on_crash`); a later put raises, nothing restarts it
"""

import threading
from collections import deque
from collections.abc import Callable

from twostroke.ipc.launch import LaunchSpec
from twostroke.ipc.local_client import RequestSender
from twostroke.ipc.sockets import Context, QueueLimits
from twostroke.protocol.errors import EngineDeadError, OverloadedError

_RETRY_S = 0.1


class Dispatcher:
    """Owns the sending end of the request queue. Safe to use from any thread.

    Args:
        context: ZMQ context.
        spec: Of the launched world.
        limits: Bound of the queue in front of the socket, and of the socket's own.
        on_crash: Called on the dispatch thread if it breaks.
    """

    def __init__(
        self, context: Context, spec: LaunchSpec, limits: QueueLimits, on_crash: Callable[[Exception], None]
    ) -> None:
        self._context = context
        self._spec = spec
        self._limits = limits
        self._on_crash = on_crash
        self._changed = threading.Condition()
        self._payloads: deque[bytes] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put_request(self, payload: bytes) -> None:
        """Queue an encoded request.

        Raises:
            OverloadedError: The queue is full.
            EngineDeadError: The thread has ended.
        """
        self._put(payload, self._limits.messages)

    def put_control(self, payload: bytes) -> None:
        """Queue an encoded abort or control message, behind all that was queued before; errors as `put_request`."""
        self._put(payload, self._limits.control)

    def _put(self, payload: bytes, bound: int) -> None:
        with self._changed:
            if self._closed:
                raise EngineDeadError("nothing is sent to this worker any more")
            if len(self._payloads) >= bound:
                raise OverloadedError(f"{len(self._payloads)} messages wait for the worker already; try again later")
            self._payloads.append(payload)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop sending; what is queued is given up."""
        with self._changed:
            self._closed = True
            self._payloads.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end after `close`; False if it goes on."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        sender = RequestSender(self._context, self._spec, self._limits)
        try:
            while (payload := self._next()) is not None:
                while not self._closed and not sender.send(payload, _RETRY_S):
                    pass
        except Exception as error:  # noqa: BLE001 - reported, and fatal to the executor
            self.close()
            self._on_crash(error)
        finally:
            sender.close()

    def _next(self) -> bytes | None:
        """Wait for the next message; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._payloads or self._closed)
            return None if self._closed else self._payloads.popleft()
