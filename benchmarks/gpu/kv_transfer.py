"""KV between two processes on one GPU over UCX, and what `kill -9` of either side does to the other.

    GB/s       of whole caches of 1 GiB, block by block in random order, beside a copy within the device
    kill       while hundreds of transfers are under way; then: does the survivor live, how and when did its transfers
               end, when are its blocks safe, and does it serve a new peer

How UCX moves the bytes (cuda_ipc, or staging through the host) is asked as `twostroke doctor` asks it.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.copy_lists import Pattern, block_lists
from benchmarks.gpu.child_pipe import ChildPipe
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kv_end import (
    Answer,
    Check,
    Checked,
    Fetch,
    FetchOver,
    Fill,
    Filled,
    LeaseOver,
    Offer,
    Offered,
    Order,
    Ready,
    Safe,
)
from benchmarks.gpu.machine import Machine
from kvtransfer.backend import MemoryKind
from kvtransfer.events import TransferOutcome
from kvtransfer.options import SharedMemory
from kvtransfer.transports import allowed_transports
from twostroke.cli.doctor.facts import TransportQuestion
from twostroke.cli.doctor.transport_probe import ask_ucx
from twostroke.protocol.tokens import pack_tokens

Kind = TypeVar("Kind", bound=Answer)
MIB = 1 << 20
CASES = {2 * MIB: 512, 64 << 10: 16384}
"""Bytes of a block, and how many of them."""
REHEARSED_CASES = {256 << 10: 16}
ROUNDS = 5
KILLED_DURING = 512
"""Transfers that are asked for at once before a side is killed: a quarter of a second of work at the least."""
_START_S = 60.0
_ANSWER_S = 20.0
_END_S = 15.0
_MODULE = "benchmarks.gpu.kv_end"


class End(ChildPipe[Order, Answer]):
    """A process with an agent, and what it told beside its answers.

    Args:
        machine: In which mode it runs.
        size: Bytes of a block.
        count: Its blocks.
    """

    def __init__(self, machine: Machine, size: int, count: int) -> None:
        super().__init__(_MODULE, [machine.mode.value, str(count), str(size)], Answer)  # type: ignore[arg-type] # a union is no `type`
        self.count = count
        self.nbytes = size * count
        self.told: list[LeaseOver | FetchOver | Safe] = []

    def next_of(self, kind: type[Kind], timeout_s: float = _ANSWER_S) -> Kind:
        """The next answer of a kind; others are kept in `told`."""
        end = time.monotonic() + timeout_s
        while True:
            answer = self.answer(max(0.0, end - time.monotonic()))
            if isinstance(answer, LeaseOver | FetchOver | Safe):
                self.told.append(answer)
            if isinstance(answer, kind):
                return answer

    def fetch_from(self, source: "End", number: int, sources: list[int], targets: list[int]) -> None:
        """Begin a transfer."""
        source.order(Offer(number, pack_tokens(sources)))
        self.order(Fetch(number, source.next_of(Offered).handle, pack_tokens(targets)))


@dataclass
class Aftermath:
    """What became of one side after the other was killed.

    Attributes:
        outcomes: How its transfers ended, also those that had ended before.
        ended_s: From the kill until the last of them had ended.
        safe_s: From the kill until all blocks might be reused; None if that never came.
        pending: Transfers that never ended.
    """

    alive: bool = True
    outcomes: Counter[str] = field(default_factory=Counter)
    ended_s: float = 0.0
    safe_s: float | None = 0.0
    pending: int = 0


def measure(machine: Machine, findings: Findings) -> None:
    """See the module."""
    memory = MemoryKind.HOST if machine.rehearses else MemoryKind.CUDA
    facts = ask_ucx(TransportQuestion(memory, allowed_transports(memory, SharedMemory.OFF).names, "lo"))
    findings.note(f"UCX {facts.ucx.version if facts.ucx else '?'} chose {facts.protocol} {facts.error}".strip())
    copied = machine.copy_gb_per_s() / 2
    findings.add("device copy, bytes copied", "GB/s", {"device copy": [copied]})
    cases = REHEARSED_CASES if machine.rehearses else CASES
    for size, count in cases.items():
        killed = size == max(cases)
        with ExitStack() as stack:
            ends = [stack.enter_context(End(machine, size, count)) for _ in range(4 if killed else 2)]
            for end in ends:
                end.next_of(Ready, _START_S)
            measure_rates(machine, findings, (ends[0], ends[1]), copied)
            if killed:
                measure_kills(machine, findings, ends)


def measure_rates(machine: Machine, findings: Findings, pair: tuple[End, End], copied: float) -> None:
    """GB/s from the reservation until the target's engine thread would know that all is there."""
    target = pair[1]
    size = target.nbytes // target.count
    for pattern in Pattern:
        rates = []
        for number in range(1, (2 if machine.rehearses else ROUNDS) + 2):
            over = _transfer(pair, number + 100 * (pattern is Pattern.SCATTERED), pattern)
            rates.append(target.nbytes / (over.at - over.started) / 1e9)
        case = f"KV transfer, {size >> 10} KiB {pattern}"
        findings.add(case, "GB/s", {"twostroke": rates[1:]})  # the first connects
        findings.add(case, "share of a device copy", {"twostroke": [rate / copied for rate in rates[1:]]})


def measure_kills(machine: Machine, findings: Findings, ends: Sequence[End]) -> None:
    """Kill the source of a pair, then the target of another, which the survivor of the first is."""
    first, survivor, second, last = ends
    transfers = 8 if machine.rehearses else KILLED_DURING
    _note(findings, "the writer", _kill(first, (first, survivor), transfers))
    _serves_on(findings, "the reader", (second, survivor), survivor)
    if survivor.alive:
        _note(findings, "the reader", _kill(survivor, (second, survivor), transfers))
        _serves_on(findings, "the writer", (second, last), second)


def _kill(victim: End, pair: tuple[End, End], transfers: int) -> Aftermath:
    """Kill one of a pair while transfers are under way; what the other one says then."""
    source, target = pair
    other = target if victim is source else source
    other.told.clear()
    blocks = list(range(target.count))
    numbers = range(1000, 1000 + transfers)
    offers = []
    for number in numbers:
        source.order(Offer(number, pack_tokens(blocks)))
        offers.append(source.next_of(Offered).handle)
    for number, handle in zip(numbers, offers, strict=True):
        target.order(Fetch(number, handle, pack_tokens(blocks)))
    target.next_of(FetchOver)
    killed = time.monotonic()
    victim.kill()
    return _watch(other, set(numbers), killed)


def _watch(other: End, numbers: set[int], killed: float) -> Aftermath:
    """Listen to the survivor until all of its transfers have ended and all blocks are safe, or patience ends."""
    after = Aftermath()
    heard = [one for one in other.told if one.number in numbers]
    unsafe: set[int] = set()
    while True:
        for one in heard:
            if isinstance(one, Safe):
                unsafe.discard(one.number)
            else:
                after.outcomes[one.outcome] += 1
                numbers.discard(one.number)
                after.ended_s = max(after.ended_s, one.at - killed)
                if isinstance(one, FetchOver) and not one.safe:
                    unsafe.add(one.number)
            after.safe_s = max(after.safe_s or 0.0, one.at - killed)
        if not numbers and not unsafe:
            break
        try:
            answer = other.answer(max(0.0, killed + _END_S - time.monotonic()))
        except (TimeoutError, RuntimeError):
            break
        heard = [answer] if isinstance(answer, LeaseOver | FetchOver | Safe) else []
    after.alive, after.pending = other.alive, len(numbers)
    after.safe_s = None if unsafe else after.safe_s
    return after


def _note(findings: Findings, killed: str, after: Aftermath) -> None:
    other = "reader" if killed == "the writer" else "writer"
    case = f"kill -9 of {killed}"
    findings.add(case, "s until all ended", {other: [after.ended_s]})
    findings.add(case, f"{other} alive", {other: [float(after.alive)]})
    safe = "never safe again within the watch" if after.safe_s is None else f"safe after {after.safe_s:.3f} s"
    findings.note(
        f"{case} during transfers: the {other} {'lives' if after.alive else 'DIED'}; its transfers ended as "
        f"{dict(after.outcomes)}, {after.pending} not at all; the last after {after.ended_s:.3f} s; blocks {safe}"
    )


def _serves_on(findings: Findings, name: str, pair: tuple[End, End], survivor: End) -> None:
    """Whether a survivor does a whole transfer with a new peer."""
    try:
        over = _transfer(pair, 1, Pattern.SCATTERED)
        text = f"{over.outcome} in {over.at - over.started:.3f} s, all blocks as sent"
    except (RuntimeError, TimeoutError) as error:
        text = f"FAILED: {error}; {survivor.last_lines()}"
    findings.note(f"{name} that survived, with a new peer: {text}")


def _transfer(pair: tuple[End, End], number: int, pattern: Pattern) -> FetchOver:
    """One transfer of all blocks, checked.

    Raises:
        RuntimeError: It did not succeed, or blocks are wrong.
    """
    source, target = pair
    sources, targets = block_lists(pattern, target.count, random.Random(number))
    for end, value in ((source, number), (target, 0)):
        end.order(Fill(value))
        end.next_of(Filled)
    target.fetch_from(source, number, sources, targets)
    over = target.next_of(FetchOver)
    if over.outcome != TransferOutcome.DONE.value:
        raise RuntimeError(f"transfer {number} {over.outcome}: {over.reason}")
    target.order(Check(number, pack_tokens(sources), pack_tokens(targets)))
    if wrong := target.next_of(Checked).wrong:
        raise RuntimeError(f"{wrong} of {target.count} blocks do not hold what was sent")
    return over
