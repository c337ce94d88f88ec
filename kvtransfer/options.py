"""Settings of a transfer agent."""

import enum
from dataclasses import dataclass, field


class BackendKind(enum.StrEnum):
    """Which transport moves the bytes."""

    LOOPBACK = "loopback"
    UCX = "ucx"


class SharedMemory(enum.StrEnum):
    """Whether UCX may write straight into another process of this host (cma).

    Off unless asked for: when the target of such writes is killed, UCX aborts the writer's process.
    """

    OFF = "off"
    CMA = "cma"


@dataclass(frozen=True, slots=True)
class TransferTimeouts:
    """Durations in seconds.

    Attributes:
        ping_s: Between pings while transfers to a peer are open.
        silence_s: A peer unheard for so long is taken for dead (which proves nothing about its writes).
        park_s: How long a reservation waits for a lease that is not known yet.
        serve_s: The longest that one transfer may occupy a lease, whatever its reader asks for.
        stop_s: How long to wait for operations in flight (context) or for `Stopped` (generation) before the
            connection is broken instead.
        idle_s: An unused connection is closed after so long.
        start_s: For the agent to bind and register its memory.

    Raises:
        ValueError: A peer would be taken for dead before two pings.
    """

    ping_s: float = 1.0
    silence_s: float = 5.0
    park_s: float = 2.0
    serve_s: float = 60.0
    stop_s: float = 2.0
    idle_s: float = 60.0
    start_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.ping_s <= self.silence_s:
            raise ValueError(
                f"pings every {self.ping_s} s leave no room for a lost one within {self.silence_s} s of silence; "
                "silence_s must be at least twice ping_s"
            )


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Bounds.

    Attributes:
        parked: Reservations that wait for their lease; further ones are refused.
        tombstones: Ended leases and transfers that are remembered, each.
        operations: Writes in flight for one transfer; enough to keep a transport busy with small blocks.
        bytes_in_flight: Bytes of these writes, but at least one write; bounds how long a cancellation takes.
        operation_bytes: Bytes of one write, but at least one block.
        messages: High-water mark of each control socket.
    """

    parked: int = 1024
    tombstones: int = 4096
    operations: int = 256
    bytes_in_flight: int = 16 << 20
    operation_bytes: int = 4 << 20
    messages: int = 4096


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How one agent works.

    Attributes:
        secret: The 32-byte cluster secret. It never shows in a repr.
        bind: Where the control endpoint listens; port 0 takes a free one.
        advertise: Host that peers connect to; None: the one bound.
        backend: The transport.
        shared_memory: Whether UCX may use cma.
        net_devices: UCX's network devices (`eth0`, `lo`, comma-separated); None: `lo` if `bind` is a loopback
            address, else all.
        timeouts: Durations.
        limits: Bounds.
    """

    secret: bytes = field(repr=False)
    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    backend: BackendKind = BackendKind.UCX
    shared_memory: SharedMemory = SharedMemory.OFF
    net_devices: str | None = None
    timeouts: TransferTimeouts = TransferTimeouts()
    limits: TransferLimits = TransferLimits()

    def ucx_devices(self) -> str | None:
        """`net_devices`, or what follows from `bind`."""
        if self.net_devices is None and self.bind.startswith(("tcp://127.", "tcp://localhost:")):
            return "lo"
        return self.net_devices
