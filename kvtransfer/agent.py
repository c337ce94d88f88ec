"""`TransferAgent`: what the engine thread holds; the transfer thread behind it does all I/O.

    engine thread                        transfer thread
    offer, revoke, fetch, cancel --commands--> sender and receiver books --> control sockets, UCX
    poll                         <--events---  (then `wake`)

Commands wait in a queue and an eventfd wakes the thread; none of the calls waits for it. Each `offer` gives one
`LeaseEnded`, each `fetch` one `FetchEnded` and at most one `BlocksSafe`, so the event queue is bounded by the leases
and fetches that the engine itself has open.

One agent serves both roles; a context worker just never fetches.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from kvtransfer.backend import Backend, BlockBuffer, MemoryKind
from kvtransfer.counters import TransferCounters
from kvtransfer.device import HostDevice, MemoryDevice
from kvtransfer.events import BlocksSafe, FetchEnded, LeaseEnded, TransferEvent
from kvtransfer.handles import handle_key, sign_handle
from kvtransfer.loopback import LoopbackBackend, LoopbackFabric
from kvtransfer.options import BackendKind, TransferOptions
from kvtransfer.process_watch import this_process
from kvtransfer.receiver import Fetch, PeerName
from kvtransfer.thread import CancelCommand, Command, FetchCommand, OfferCommand, RevokeCommand, TransferThread
from kvtransfer.transports import allowed_transports
from twostroke.ipc.curve import SECRET_BYTES
from twostroke.protocol.errors import ConfigError, EngineDeadError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import TRANSFER_VERSION, LayoutFingerprint, TransferHandle

log = structlog.get_logger(__name__)


def open_backend(options: TransferOptions, memory: MemoryKind, fabric: LoopbackFabric | None) -> Backend:
    """The transport that `options` names, for a buffer in `memory`; logs which.

    Raises:
        ConfigError: Loopback without a fabric.
        BackendError: UCX cannot start.
    """
    log.info("transfer backend chosen", backend=options.backend.value, shared_memory=options.shared_memory.value)
    if options.backend is BackendKind.LOOPBACK:
        if fabric is None:
            raise ConfigError("transfer.backend: loopback joins roles of one process and needs their common fabric")
        return LoopbackBackend(fabric)
    from kvtransfer.ucx import UcxBackend  # noqa: PLC0415 - UCX is loaded only where it is used

    return UcxBackend(allowed_transports(memory, options.shared_memory), options.ucx_devices())


class TransferAgent:
    """Moves KV blocks for one worker. When the constructor returns, it is bound and its memory is registered.

    All methods are for one thread, the engine thread, but for `counters`.

    Args:
        options: Settings.
        epoch: Of this worker.
        layout: Of its cache.
        buffer: Its cache's memory; kept alive until `close`.
        wake: Called from the transfer thread after events were queued; must not block.
        device: What computes in that memory; None: the CPU.
        fabric: Joins the loopback agents of one process.

    Raises:
        ValueError: The memory is a GPU's, and no device was given that can say when its steps are done.
        ConfigError: The secret has the wrong length, or an option is missing.
        BackendError: The transport cannot start or register the memory.
        zmq.ZMQError: The control endpoint cannot be bound.
        TimeoutError: It did not start in `timeouts.start_s`.
    """

    def __init__(
        self,
        options: TransferOptions,
        epoch: int,
        layout: LayoutFingerprint,
        buffer: BlockBuffer,
        *,
        wake: Callable[[], None],
        device: MemoryDevice | None = None,
        fabric: LoopbackFabric | None = None,
    ) -> None:
        if device is None and buffer.kind is not MemoryKind.HOST:
            raise ValueError(f"{buffer.kind} memory needs the device that computes in it: its steps end later")
        if len(options.secret) != SECRET_BYTES:
            raise ConfigError(f"security.secret_file: a secret has {SECRET_BYTES} bytes, not {len(options.secret)}")
        self._epoch = epoch
        self._layout = layout
        self._buffer = buffer
        self._device = device or HostDevice()
        self._key = handle_key(options.secret)
        self._process = this_process()
        self._events: deque[TransferEvent] = deque()
        self._leases: set[SequenceKey] = set()
        self._transfers: set[int] = set()
        self._closed = False
        self._thread = TransferThread(
            options,
            epoch,
            layout,
            buffer,
            device=self._device,
            open_backend=lambda: open_backend(options, buffer.kind, fabric),
            emit=self._events.append,
            wake=wake,
        )
        self.address = self._thread.start()

    def offer(self, key: SequenceKey, blocks: Sequence[int], expiry_s: float) -> TransferHandle:
        """Lease `blocks` of sequence `key` for `expiry_s`; they may be read until `LeaseEnded(key)`.

        The steps that write them must have been queued on the device; they are sent once those have ended.

        Returns:
            The signed handle for the generation worker.

        Raises:
            ValueError: The sequence has a lease already, or a block is not in the cache.
            EngineDeadError: The transfer thread has ended.
        """
        if key in self._leases:
            raise ValueError(f"sequence {key} has an open lease already")
        self._check_blocks(blocks)
        self._post(OfferCommand(key, tuple(blocks), expiry_s, self._device.mark()))
        self._leases.add(key)
        handle = TransferHandle(
            version=TRANSFER_VERSION,
            epoch=self._epoch,
            key=key,
            address=self.address,
            layout=self._layout,
            blocks=len(blocks),
            expires_in_s=expiry_s,
            process=self._process,
        )
        return sign_handle(self._key, handle)

    def revoke(self, key: SequenceKey) -> None:
        """Take a lease back; `LeaseEnded(key)` follows when nothing touches its blocks. A no-op once it has ended.

        Raises:
            EngineDeadError: The transfer thread has ended.
        """
        self._post(RevokeCommand(key))

    def fetch(
        self,
        transfer_id: int,
        handle: TransferHandle,
        positions: Sequence[int],
        blocks: Sequence[int],
        deadline_s: float,
    ) -> None:
        """Ask the context worker to write leased block number `positions[i]` into our block `blocks[i]`, for every i.

        Empty lists just end the lease. Exactly one `FetchEnded` follows; until its `blocks_safe`, or `BlocksSafe`,
        the blocks must not be used for anything else. Nothing is asked for before the steps have ended that are queued
        on the device now, since they may still use the blocks for what was in them.

        Args:
            transfer_id: Never used before in this epoch.
            handle: From context_phase_params.
            positions: Numbers within the leased list.
            blocks: Block numbers here, as many, without repeats.
            deadline_s: When to give up.

        Raises:
            ValueError: The lists do not match, a block is not in the cache, or the transfer id is open.
            EngineDeadError: The transfer thread has ended.
        """
        if transfer_id in self._transfers:
            raise ValueError(f"transfer {transfer_id} is open already")
        if len(positions) != len(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"{len(positions)} positions need as many different blocks, not {list(blocks)}")
        self._check_blocks(blocks)
        peer = PeerName(handle.address, handle.epoch)
        deadline = time.monotonic() + deadline_s
        fetch = Fetch(transfer_id, peer, handle, tuple(positions), tuple(blocks), deadline_s, deadline)
        self._post(FetchCommand(fetch, self._device.mark()))
        self._transfers.add(transfer_id)

    def cancel(self, transfer_id: int) -> None:
        """Give a fetch up; its `FetchEnded` follows, unless it is queued already.

        Raises:
            EngineDeadError: The transfer thread has ended.
        """
        self._post(CancelCommand(transfer_id))

    def poll(self) -> list[TransferEvent]:
        """All events since the last call, in order; never waits.

        Raises:
            EngineDeadError: The transfer thread has ended by an error; nothing is known of blocks that are still out.
        """
        events: list[TransferEvent] = []
        while self._events:
            event = self._events.popleft()
            events.append(event)
            match event:
                case LeaseEnded(key):
                    self._leases.discard(key)
                case FetchEnded(transfer_id, blocks_safe=True) | BlocksSafe(transfer_id):
                    self._transfers.discard(transfer_id)
        if not events:
            self._check_alive()
        return events

    def counters(self) -> TransferCounters:
        """A snapshot of the numbers; callable from any thread."""
        return self._thread.counters.snapshot()

    def close(self, deadline_s: float) -> None:
        """End everything: leases are revoked, fetches cancelled, then all connections closed. Idempotent.

        The last events can still be polled afterwards.

        Raises:
            TimeoutError: The thread did not end in `deadline_s`; the buffer must then stay alive.
        """
        self._closed = True
        self._thread.close(deadline_s)

    def _post(self, command: Command) -> None:
        if self._closed:
            raise EngineDeadError("the transfer agent is closed")
        self._check_alive()
        self._thread.post(command)

    def _check_alive(self) -> None:
        if self._thread.failure is not None:
            raise EngineDeadError(f"the transfer thread stopped: {self._thread.failure}")

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._buffer.num_blocks:
            raise ValueError(
                f"blocks {min(blocks)}..{max(blocks)} are outside the cache of {self._buffer.num_blocks} blocks"
            )
