"""Who a worker is, what it can do, and how it fares."""

import enum

import msgspec

from twostroke.protocol.durations import HandoverTimes
from twostroke.protocol.transfer import LayoutFingerprint


class Role(enum.StrEnum):
    """Which phases a worker runs. `AGGREGATED` runs both; it is the baseline of every comparison."""

    CONTEXT = "context"
    GENERATION = "generation"
    AGGREGATED = "aggregated"


class WorkerIdentity(msgspec.Struct, frozen=True, tag="identity"):
    """Sent by each rank before it loads weights, so that its death can be noticed from then on.

    Attributes:
        rank: Rank in the worker world.
        pid: Process id on its host.
        start_time: Start of the process in clock ticks since boot (`/proc/<pid>/stat` field 22): tells a reused pid.
        host: Host name.
        epoch: Epoch of the world.
    """

    rank: int
    pid: int
    start_time: int
    host: str
    epoch: int


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend needs to know of a worker.

    Attributes:
        role: Phases that it runs.
        model: Served model name.
        max_model_len: Prompt and output tokens of one sequence at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Ids that end a sequence unless `ignore_eos`.
        num_blocks: KV blocks in all.
        max_sequences: Sequences that run at the same time at most.
        layout: Layout of its KV cache.
        address: TCP address where frontends attach (`tcp://host:port`), or "" if it takes none.
    """

    role: Role
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    max_sequences: int
    layout: LayoutFingerprint
    address: str = ""


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The world is up and takes requests."""

    epoch: int
    description: WorkerDescription


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The world could not start; `message` says why and what to do.

    Attributes:
        wrong_setting: A setting or the model is at fault: another start would not help.
    """

    epoch: int
    rank: int
    message: str
    wrong_setting: bool = False


class InitProgress(msgspec.Struct, frozen=True, tag="progress"):
    """For people who wait: what the world is doing now (`loading weights`, `checking attention`)."""

    epoch: int
    text: str


class InitAck(msgspec.Struct, frozen=True, tag="ack"):
    """The launcher's answer to each message on the init status queue."""

    epoch: int


InitStatus = WorkerIdentity | WorkerReady | WorkerFailed | InitProgress


class BlockCounts(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks by state; every block is in exactly one, so the sum is the worker's total."""

    free: int = 0
    cached: int = 0
    active: int = 0
    leased: int = 0
    reserved: int = 0
    quarantined: int = 0

    @property
    def total(self) -> int:
        """All blocks."""
        return self.free + self.cached + self.active + self.leased + self.reserved + self.quarantined


class WorkerCounters(msgspec.Struct, frozen=True, array_like=True):
    """Counts since the worker started.

    Attributes:
        steps: Engine steps.
        prompt_tokens: Prompt tokens computed.
        cached_tokens: Prompt tokens found in the prefix cache.
        output_tokens: Tokens made.
        preemptions: Sequences set back to recompute.
        dropped_messages: Messages dropped for a wrong epoch, key or form.
        transfers_done: KV transfers completed.
        transfers_failed: KV transfers ended otherwise.
        transfer_bytes: Bytes of KV moved.
        handover: How long the parts of hand-overs took that this worker's role knows.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    dropped_messages: int = 0
    transfers_done: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    handover: HandoverTimes = {}


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy a worker is.

    Attributes:
        running: Sequences in the batch.
        waiting: Sequences not admitted yet.
        waiting_tokens: Prompt tokens not computed yet, over all sequences.
        blocks: KV blocks by state.
        admitting: False while a context worker is at its cap of leased blocks, or the worker drains.
        counters: Counts since start.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks: BlockCounts = BlockCounts()
    admitting: bool = True
    counters: WorkerCounters = WorkerCounters()


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Sent every 250 ms by the worker's I/O thread.

    Attributes:
        epoch: The worker's epoch.
        step_age_s: Seconds since the engine loop last went round; large while a step hangs.
        load: How busy the worker is.
    """

    epoch: int
    step_age_s: float
    load: WorkerLoad


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """The worker took a frontend on."""

    version: int
    epoch: int
    description: WorkerDescription


class AttachRefused(msgspec.Struct, frozen=True, array_like=True, tag="attach_refused"):
    """The worker did not take a frontend on, and why."""

    version: int
    epoch: int
    message: str


class WorkerStopping(msgspec.Struct, frozen=True, array_like=True, tag="stopping"):
    """The worker ends now; pending requests fail with `reason`."""

    epoch: int
    reason: str
