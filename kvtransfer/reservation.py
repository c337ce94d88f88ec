"""What a context worker demands of a reservation before it serves it."""

from dataclasses import dataclass

from kvtransfer.handles import verify_handle
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, LayoutFingerprint, Reserve

_ADDRESS_SPACE = 1 << 64


class ReservationError(ProtocolError):
    """A reservation is refused; the message says why, for the generation worker's log."""


class ForgedHandleError(ReservationError):
    """The handle was not signed by this cluster, or was changed since."""


class StaleEpochError(ReservationError):
    """The handle is from another start of the context worker: its leases are gone."""


@dataclass(frozen=True, slots=True)
class ContextTerms:
    """What this context worker is, as a reservation must match it.

    Attributes:
        epoch: Of this worker.
        key: MAC key of handles.
        layout: Of its cache.
        block_bytes: Bytes of one of its blocks.
    """

    epoch: int
    key: bytes
    layout: LayoutFingerprint
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Copies:
    """What a checked reservation asks for: leased block number `positions[i]` to the peer's block `blocks[i]`."""

    positions: list[int]
    blocks: list[int]


def check_reservation(request: Reserve, terms: ContextTerms) -> Copies:
    """The copies that `request` asks for, once everything in it is in order.

    The number of leased blocks is taken from the handle, which is signed.

    Raises:
        ReservationError: Something is not; `ForgedHandleError` and `StaleEpochError` are told apart for counting.
    """
    handle = request.handle
    if not verify_handle(terms.key, handle):
        raise ForgedHandleError("the transfer handle is not signed with this cluster's secret; was it changed?")
    if request.version != TRANSFER_VERSION or handle.version != TRANSFER_VERSION:
        raise ReservationError(
            f"transfer protocol version {request.version} (handle {handle.version}) is not {TRANSFER_VERSION}; "
            "run the same release on both roles"
        )
    if handle.epoch != terms.epoch:
        raise StaleEpochError(f"lease {handle.key} is from epoch {handle.epoch:x} of this worker, now {terms.epoch:x}")
    check_layout(handle.layout, terms.layout)
    if request.block_bytes != terms.block_bytes:
        raise ReservationError(
            f"blocks of {request.block_bytes} bytes cannot take blocks of {terms.block_bytes} bytes ({terms.layout})"
        )
    return _check_copies(request)


def check_layout(theirs: LayoutFingerprint, ours: LayoutFingerprint) -> None:
    """Raise unless both caches have the same layout.

    Raises:
        ReservationError: They differ; both are in the message.
    """
    if theirs != ours:
        raise ReservationError(f"the KV layouts differ: the peer has {theirs}, this worker has {ours}")


def _check_copies(request: Reserve) -> Copies:
    copies = Copies(unpack_tokens(request.positions), unpack_tokens(request.blocks))
    positions, blocks, leased = copies.positions, copies.blocks, request.handle.blocks
    if len(positions) != len(blocks):
        raise ReservationError(f"{len(positions)} positions do not match {len(blocks)} blocks")
    if positions and not 0 <= min(positions) <= max(positions) < leased:
        raise ReservationError(f"positions {min(positions)}..{max(positions)} are outside the {leased} leased blocks")
    if blocks and not 0 <= min(blocks) <= max(blocks) < request.num_blocks:
        raise ReservationError(
            f"blocks {min(blocks)}..{max(blocks)} are outside the cache of {request.num_blocks} blocks"
        )
    if len(set(blocks)) != len(blocks):
        raise ReservationError("a target block is named twice")
    end = request.base + request.num_blocks * request.block_bytes
    if not 0 < request.base < end <= _ADDRESS_SPACE:
        raise ReservationError(f"a cache at {request.base:#x}..{end:#x} is not in memory")
    return copies
