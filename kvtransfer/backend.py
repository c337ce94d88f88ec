"""The seam between the transfer agent and a transport: register, connect, write, flush, poll, close.

    target (generation side)                     source (context side)
    backend.register(buffer)                     backend.register(buffer)
    inlet = backend.open_inlet()
      inlet.address, inlet.key   --Reserve-->    connection = backend.connect(address, key)
                                                 connection.write(...) -> Operation   (many)
                                                 connection.flush()    -> Operation   (all earlier writes have landed)
    inlet.close()                                connection.close()

An inlet admits writes from one peer. Both sides call `progress` whenever the file descriptors wake them: over tcp the
target moves the bytes into its memory itself, so a target that does not progress receives nothing, and a target whose
inlet is closed can no longer be written.

All methods are called by one thread, the transfer thread. None of them waits.
"""

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.protocol.errors import TwostrokeError


class BackendError(TwostrokeError):
    """The transport refused or broke an operation; the message carries its own words and status."""


class MemoryKind(enum.StrEnum):
    """Where a buffer lies; a transport reaches each in its own way."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class BlockBuffer:
    """The memory that holds all KV blocks of one rank, contiguous and block after block.

    Attributes:
        address: Address of block 0 in this process.
        block_bytes: Bytes of one block.
        num_blocks: How many blocks.
        owner: Whatever keeps the memory alive; held for as long as the buffer may be touched.
        kind: Where the memory lies.

    Raises:
        ValueError: A size or the address is not positive.
    """

    address: int
    block_bytes: int
    num_blocks: int
    owner: object
    kind: MemoryKind = MemoryKind.HOST

    def __post_init__(self) -> None:
        if self.address <= 0 or self.block_bytes <= 0 or self.num_blocks <= 0:
            raise ValueError(
                f"a block buffer needs a positive address, block size and count, "
                f"not {self.address:#x}, {self.block_bytes} and {self.num_blocks}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.block_bytes * self.num_blocks


class OperationState(enum.Enum):
    """How far a write or flush is."""

    PENDING = enum.auto()
    COMPLETE = enum.auto()
    FAILED = enum.auto()


class Operation(abc.ABC):
    """One write or flush in flight. The source bytes must stay until it is no longer pending."""

    @abc.abstractmethod
    def poll(self) -> OperationState:
        """Where it stands now; never waits. Once it has left `PENDING` the answer stays."""

    @property
    @abc.abstractmethod
    def error(self) -> str:
        """Why it failed, in the transport's words; empty unless it did."""


class Connection(abc.ABC):
    """The source's way into one peer's inlet."""

    @abc.abstractmethod
    def write(self, local_address: int, remote_address: int, nbytes: int) -> Operation:
        """Start copying `nbytes` from this process to the peer.

        Raises:
            BackendError: The transport refused; the connection is of no more use.
        """

    @abc.abstractmethod
    def flush(self) -> Operation:
        """Start an operation that completes when all earlier writes have landed in the peer's memory.

        Raises:
            BackendError: The transport refused; the connection is of no more use.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Drop the connection at once. Operations in flight are abandoned and touch this process's memory no more."""


class Inlet(abc.ABC):
    """The target's door for one peer."""

    @property
    @abc.abstractmethod
    def address(self) -> bytes:
        """How the peer connects, opaque to everything but the same backend."""

    @property
    @abc.abstractmethod
    def key(self) -> bytes:
        """The right to write into the registered buffer, opaque likewise."""

    @abc.abstractmethod
    def close(self) -> None:
        """Shut the door. Whether that proves that nothing writes any more: `Backend.close_is_proof`."""


class Backend(abc.ABC):
    """One transport in one process."""

    @property
    @abc.abstractmethod
    def close_is_proof(self) -> bool:
        """True when a closed inlet cannot be written any more, whatever the peer does.

        Where the writer may reach into our memory by itself (cma, cuda_ipc), only its word or its exit is proof, unless
        it is on another host.
        """

    @abc.abstractmethod
    def register(self, buffer: BlockBuffer) -> None:
        """Make `buffer` readable by our own writes and writable through our inlets; called once.

        Raises:
            BackendError: The transport refused.
        """

    @abc.abstractmethod
    def open_inlet(self) -> Inlet:
        """A new door for one peer.

        Raises:
            BackendError: The transport refused.
        """

    @abc.abstractmethod
    def connect(self, address: bytes, key: bytes) -> Connection:
        """A connection to the inlet that `address` and `key` describe. Does not wait for the peer.

        Raises:
            BackendError: The address or key makes no sense to this transport.
        """

    @abc.abstractmethod
    def progress(self) -> bool:
        """Let the transport work: receive, send, complete. True: there may be more to do at once, do not sleep."""

    @abc.abstractmethod
    def file_descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when `progress` has work, provided `arm` said so."""

    @abc.abstractmethod
    def arm(self) -> bool:
        """Prepare to sleep on the descriptors, after `progress` said False. False: there is work already."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close every connection and inlet, then the transport; the buffer is no longer touched."""
