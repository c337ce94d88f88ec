"""KV transfer on the wire: handles, context_phase_params, and the control messages between the two roles.

The life of one transfer (G = generation worker, C = context worker):

    C: lease starts (`offer`)  --context_phase_params through the router-->  G
    G: reserves blocks         --Reserve-->  C
    C: writes the blocks over UCX, flushes, ends the lease
    C: --Done(count)-->  G decodes                      or  --Stopped(reason)-->  G frees the blocks and fails

`Cancel` from G asks C to stop; C answers `Stopped` when no operation can touch G's blocks any more. Either side's
death is seen through `Ping`/`Pong` silence; silence alone is no proof that the peer stopped writing (see
`kvtransfer`). Messages travel over one CURVE-encrypted ZMQ connection from G to the address in the handle. They carry
durations, never wall-clock times.
"""

import enum

import msgspec

from twostroke.protocol.ids import SequenceKey

TRANSFER_VERSION = 2


class LayoutFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What both sides of a transfer must share; head ranges are negotiated, all else must match.

    Attributes:
        model: Digest of the model's config and of samples of its weights (hex).
        dtype: Element type of the cache, as torch names it (`float32`, `bfloat16`).
        block_size: Tokens in one block.
        layers: Attention layers that keep K and V.
        kv_heads: KV heads over all ranks.
        head_dim: Elements of one head.
    """

    model: str
    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """A process, so that a peer on the same host can watch it exit.

    Attributes:
        host: Names the host and the pid namespace; empty if unknown.
        pid: The process there; 0 if unknown.
    """

    host: str = ""
    pid: int = 0


class TransferHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the leased blocks of one sequence lie, and the right to ask for them.

    Attributes:
        version: `TRANSFER_VERSION` of the context worker.
        epoch: Epoch of the context worker.
        key: The sequence whose blocks are leased.
        address: ZMQ address of the context worker's control endpoint (`tcp://host:port`).
        layout: Layout of its cache.
        blocks: How many blocks are leased.
        expires_in_s: Length of the lease when it was made.
        process: The context worker, which will write.
        mac: HMAC-SHA256 over all fields above with a key derived from the cluster secret.
    """

    version: int
    epoch: int
    key: SequenceKey
    address: str
    layout: LayoutFingerprint
    blocks: int
    expires_in_s: float
    process: ProcessName = ProcessName()
    mac: bytes = b""


class ContextPhaseParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation worker needs to take a sequence over from a context worker.

    The sampling state is (seed, output index): random numbers are counter-based, so nothing else is handed over.

    Attributes:
        version: `TRANSFER_VERSION` of the context worker.
        handle: Where the KV blocks are.
        prompt_tokens: Length of the prompt, as a check against the request's own.
        first_token_ids: The token(s) that the context phase made, int32 buffer.
    """

    version: int
    handle: TransferHandle
    prompt_tokens: int
    first_token_ids: bytes


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """G asks C to write blocks of a lease into G's reserved blocks.

    An empty list of blocks is a plain release: G holds all it needs, and the lease may end.

    Attributes:
        version: Protocol version of G.
        transfer_id: Names this transfer; drawn by G, never reused in G's epoch.
        epoch: G's epoch.
        handle: The handle from context_phase_params, with its MAC.
        positions: int32 buffer: numbers within the leased list, from 0.
        blocks: int32 buffer, same length: block numbers in G's cache.
        base: Address of G's block 0 in its own memory.
        block_bytes: Bytes of one block in G's cache.
        num_blocks: Blocks in G's cache; every entry of `blocks` is below it.
        peer_address: UCX worker address of G (opaque to the control plane).
        rkey: Packed remote key of G's cache (opaque to the control plane).
        deadline_s: How long G waits for the end of this transfer.
    """

    version: int
    transfer_id: int
    epoch: int
    handle: TransferHandle
    positions: bytes
    blocks: bytes
    base: int
    block_bytes: int
    num_blocks: int
    peer_address: bytes
    rkey: bytes
    deadline_s: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """G gives a transfer up; C stops issuing and answers `Stopped` once nothing can touch G's blocks."""

    transfer_id: int
    epoch: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """C wrote and flushed all blocks of a transfer; `count` is how many."""

    transfer_id: int
    epoch: int
    count: int


class StopReason(enum.StrEnum):
    """Why C ended a transfer without completing it."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNKNOWN_LEASE = "unknown_lease"
    REFUSED = "refused"
    FAILED = "failed"


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """C will not write to G's blocks of this transfer, now or later.

    Attributes:
        transfer_id: The transfer.
        epoch: C's epoch.
        reason: Why.
        message: For people: what is wrong, with the value.
    """

    transfer_id: int
    epoch: int
    reason: StopReason
    message: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """G asks whether C lives; sent while transfers are open."""

    epoch: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """C's answer, with its own epoch."""

    epoch: int


ToContext = Reserve | Cancel | Ping
"""What a generation worker may send to a context worker."""
ToGeneration = Done | Stopped | Pong
"""What a context worker may send to a generation worker."""
