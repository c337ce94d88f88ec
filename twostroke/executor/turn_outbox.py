"""What one attachment has to send: messages posted in one turn of the loop leave together, at its end.

    post --the first of a turn--> a flush is scheduled --end of the turn--> sent
                                                                       or stuck: the socket's queue is full

What is stuck waits in order, aborts behind their requests, until somebody flushes again.
"""

import asyncio
from collections.abc import Callable, Sequence

from twostroke.ipc.codec import MAX_BUNDLE


class TurnOutbox:
    """Encoded messages in front of a socket, in order. Used on one loop.

    Args:
        loop: The loop.
        send: Sends some as one bundle; False, and none is sent, if the socket is full.
        on_turn: Called at the end of a turn in which something was posted; to flush.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Callable[[Sequence[bytes]], bool], on_turn: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._send = send
        self._on_turn = on_turn
        self._payloads: list[bytes] = []
        self._scheduled = False

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def stuck(self) -> bool:
        """Whether something waits that no scheduled flush will send."""
        return bool(self._payloads) and not self._scheduled

    def post(self, payload: bytes) -> None:
        """Send `payload` behind all that waits, at the end of this turn."""
        self._payloads.append(payload)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def flush(self) -> bool:
        """Send what waits; False if some of it still does."""
        while self._payloads:
            if not self._send(self._payloads[:MAX_BUNDLE]):
                return False
            del self._payloads[:MAX_BUNDLE]
        return True

    def clear(self) -> None:
        """Forget what waits."""
        self._payloads.clear()

    def _turn(self) -> None:
        self._scheduled = False
        self._on_turn()
