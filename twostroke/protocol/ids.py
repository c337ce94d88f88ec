"""Names of requests, sequences and workers.

A *client id* is one request's 64-bit name everywhere: router, context worker, generation worker and KV transfer. Its
high 16 bits name the frontend that drew it, so a worker routes a response by the id alone. A *sequence key* adds the
index (`n > 1`) and the attempt (retries). An *epoch* names one start of one worker: a message that carries another
epoch than the receiver's comes from, or was meant for, a process that is gone.
"""

import itertools
import secrets
import threading

import msgspec

FRONTEND_BITS = 16
COUNTER_BITS = 48
MAX_FRONTEND_ID = (1 << FRONTEND_BITS) - 1
LAUNCHING_FRONTEND = 0
"""The frontend that started the worker world and owns it; attached frontends draw a random id from 1 up."""


class SequenceKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence of one request in one attempt.

    Attributes:
        client_id: Unsigned 64-bit name of the request.
        index: Which of the `n` continuations, from 0.
        attempt: How many times the request was placed before, from 0.
    """

    client_id: int
    index: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.client_id:016x}/{self.index}/{self.attempt}"


def frontend_of(client_id: int) -> int:
    """The id of the frontend that drew `client_id`."""
    return client_id >> COUNTER_BITS


def draw_frontend_id() -> int:
    """A random id for an attached frontend; a worker refuses one that another live frontend holds."""
    return secrets.randbelow(MAX_FRONTEND_ID) + 1


def draw_epoch() -> int:
    """A name for one start of a worker: 63 random bits, so that no two starts share one."""
    return secrets.randbits(63)


class ClientIds:
    """Draws client ids for one frontend; safe to call from any thread.

    Raises:
        ValueError: The frontend id does not fit 16 bits.
    """

    def __init__(self, frontend_id: int) -> None:
        if not 0 <= frontend_id <= MAX_FRONTEND_ID:
            raise ValueError(f"frontend id {frontend_id} is outside 0..{MAX_FRONTEND_ID}")
        self.frontend_id = frontend_id
        self._counter = itertools.count(1)
        self._lock = threading.Lock()

    def draw(self) -> int:
        """A client id never drawn before by this object."""
        with self._lock:
            counter = next(self._counter)
        return (self.frontend_id << COUNTER_BITS) | (counter & ((1 << COUNTER_BITS) - 1))
