"""What a supervised process and its supervisor say to each other, without a queue.

A supervisor (`twostroke up`) starts a part with two environment variables:

    TWOSTROKE_READY_FD     write end of a pipe: a JSON object a line, `{"event": "progress", ...}` any number of times,
                           then `{"event": "ready", ...}` once, as soon as the part answers on its ports
    TWOSTROKE_PARENT_PID   the supervisor's process id: the part dies with it, however it dies

A part started by hand has neither, and then both halves of this module do nothing.
"""

import ctypes
import os
import signal
from collections.abc import Mapping

import msgspec

READY_FD_VARIABLE = "TWOSTROKE_READY_FD"
PARENT_PID_VARIABLE = "TWOSTROKE_PARENT_PID"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class PartProgress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """What a part is doing until it is ready, for the people who wait (`loading weights`)."""

    text: str


class PartReady(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """A part answers on its ports now.

    Attributes:
        http: `http://host:port` of its HTTP port.
        admin: `http://host:port` of its admin port; None if it has none.
        worker: ZMQ address where frontends attach (`tcp://host:port`); "" if it takes none.
    """

    http: str
    admin: str | None = None
    worker: str = ""


PartEvent = PartProgress | PartReady


def announce_ready(http: str, *, worker: str = "", admin: str | None = None) -> None:
    """Tell the supervisor, if there is one, that this part answers on its ports now."""
    _announce(PartReady(http, admin, worker))


def announce_progress(text: str) -> None:
    """Tell the supervisor, if there is one, what this part is doing until it is ready."""
    _announce(PartProgress(text))


def decode_event(line: bytes) -> PartEvent:
    """One line of a part's pipe.

    Raises:
        msgspec.DecodeError: The line is no event (`ValidationError` included).
    """
    return msgspec.json.decode(line, type=PartEvent)


def die_with_parent(parent_pid: int, *, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent ends, even by `kill -9`.

    The kernel watches the thread that forked, so a parent starts its children from a thread that lives as long as it
    does. Linux only; see prctl(2), PR_SET_PDEATHSIG.

    Args:
        parent_pid: Who started this process; if that is no longer its parent, the parent has died in the meantime.
        with_signal: What this process gets.

    Raises:
        SystemExit: The parent is gone already.
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent process {parent_pid} is gone; ending")


def die_with_supervisor(environment: Mapping[str, str]) -> None:
    """Die with the supervisor that `environment` names; do nothing for a part started by hand."""
    named = environment.get(PARENT_PID_VARIABLE)
    if named is not None:
        die_with_parent(int(named))


def _announce(event: PartEvent) -> None:
    named = os.environ.get(READY_FD_VARIABLE)
    if named is None:
        return
    descriptor = int(named)
    os.set_inheritable(descriptor, False)  # the part's own children must not hold the pipe open
    try:
        os.write(descriptor, msgspec.json.encode(event) + b"\n")
    except BrokenPipeError:
        return  # the supervisor is gone or no longer listens; `die_with_supervisor` deals with the first
