"""How fast do KV blocks move between two processes, against a bare loop of UCX puts over the same addresses?

    python -m benchmarks.kv_transfer [--rounds 5] [--mib 512] [--cma] [--peers DIR]

Every contender copies all blocks of one cache into another, once a round, in an order of its own round:

    twostroke      the `kvtransfer` package between two processes: reservation, control messages, puts in slices,
                   flush, `Done`; from the engine's `fetch` until the engine knows that all has landed
    put loop       ctypes in Python: put, put, ..., flush, progress until complete; both sides spin
    ucx_perftest   UCX's own test, in C; it writes one buffer over and over, which stays in the caches
    NIXL           what vLLM's connector uses: prepared lists, a transfer of chosen blocks, polled until done

The caches are larger than the processor's, and marks at both ends of every block show that all arrived where they
should. Over tcp, the default, bytes pass through the kernel's `lo` device, whose counter says so. With `--cma` the same
is measured over shared memory, where killing the target aborts the writer: nothing is killed here.
"""

import argparse
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.copy_lists import Pattern, block_lists
from benchmarks.nixl_writes import INSTALL as NIXL_INSTALL
from benchmarks.nixl_writes import measure_nixl
from benchmarks.processes import cpu_us
from benchmarks.report import Absence, Better, Report, interleave, output_options, publish
from benchmarks.transfer_end import Clear, Copies, Fetch, Number, Put, Serve, TransferEnd
from benchmarks.ucx_perftest import find_perftest, put_bandwidth
from kvtransfer.backend import MemoryKind
from kvtransfer.options import SharedMemory
from kvtransfer.transports import allowed_transports

OURS, LOOP, PERFTEST, NIXL = "twostroke", "put loop", "ucx_perftest (hot buffer)", "NIXL"
KIB = 1 << 10
SIZES = (64 * KIB, 512 * KIB, 2048 * KIB)
BOUNDS = {(64 * KIB, Pattern.SCATTERED): (0.7, 0.8), (2048 * KIB, Pattern.SCATTERED): (0.9, 0.95)}
"""Limit and aim of the ratio to the put loop."""
MS_PER_US = 1e-3


@dataclass(slots=True)
class Spent:
    """What the copies of one contender and case cost, beside time.

    Attributes:
        cpu_ms_per_gb: Processor time of both processes, each round.
        lo_share: Bytes through the `lo` device for each byte copied, each round.
    """

    cpu_ms_per_gb: list[float]
    lo_share: list[float]


class Pair:
    """Both ends, with the copies of one case.

    Args:
        source: The end that writes.
        target: The end that is written to.
        size: Bytes of a block.
        count: Blocks of each.
    """

    def __init__(self, source: TransferEnd, target: TransferEnd, size: int, count: int) -> None:
        self._source = source
        self._target = target
        self._size = size
        self._count = count
        self._numbers = itertools.count(1)
        self._draw = random.Random(size)
        self._door = target.open_door()
        source.took(Number())

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self._size * self._count

    def fetch(self, pattern: Pattern, spent: Spent) -> float:
        """GB/s of one transfer by the package."""
        copies = self._copies(pattern)
        number = next(self._numbers)
        handle = self._source.offer(number, copies.sources)
        order = Fetch(number, handle, copies.targets)
        return self._measure(copies, spent, lambda: self._target.took(order))

    def put(self, pattern: Pattern, spent: Spent) -> float:
        """GB/s of one run of the put loop."""
        copies = self._copies(pattern)
        self._target.order(Serve())
        order = Put(self._door, copies)
        return self._measure(copies, spent, lambda: self._source.took(order))

    def _copies(self, pattern: Pattern) -> Copies:
        self._target.took(Clear())
        return Copies.of(*block_lists(pattern, self._count, self._draw))

    def _measure(self, copies: Copies, spent: Spent, copy: Callable[[], float]) -> float:
        nbytes = self.nbytes
        cpu, through_lo = self._cpu_ms(), lo_bytes()
        seconds = copy()
        spent.cpu_ms_per_gb.append((self._cpu_ms() - cpu) / nbytes * 1e9)
        spent.lo_share.append((lo_bytes() - through_lo) / nbytes)
        if wrong := self._target.wrong(copies):
            raise RuntimeError(f"{wrong} of {self._count} blocks do not hold what they should")
        return nbytes / seconds / 1e9

    def _cpu_ms(self) -> float:
        return sum(cpu_us(end.process.pid) for end in (self._source, self._target)) * MS_PER_US


@contextmanager
def running_pair(nbytes: int, size: int, shared_memory: SharedMemory) -> Iterator[Pair]:
    """Start both ends."""
    with (
        TransferEnd(nbytes, size, shared_memory) as source,
        TransferEnd(nbytes, size, shared_memory) as target,
    ):
        yield Pair(source, target, size, nbytes // size)


def lo_bytes() -> int:
    """Bytes that the `lo` device has carried since the host started."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("this host has no lo device")


def case_name(shared_memory: SharedMemory, size: int, pattern: Pattern) -> str:
    """As it stands in the report."""
    transport = "cma" if shared_memory is SharedMemory.CMA else "tcp"
    return f"{transport}, {size // KIB} KiB {pattern}"


def measure(report: Report, options: argparse.Namespace, shared_memory: SharedMemory, size: int) -> None:
    """Take all contenders' samples for one transport and block size."""
    nbytes = options.mib * KIB * KIB
    transports = ",".join(allowed_transports(MemoryKind.HOST, shared_memory).names)
    with running_pair(nbytes, size, shared_memory) as pair:
        for pattern in Pattern:
            case = case_name(shared_memory, size, pattern)
            spent = {name: Spent([], []) for name in (OURS, LOOP)}
            ours = functools.partial(pair.fetch, pattern, spent[OURS])
            loop = functools.partial(pair.put, pattern, spent[LOOP])
            ours(), loop()  # connect
            samples = interleave(options.rounds, {OURS: ours, LOOP: loop}, case)
            report.add(case, "GB/s", samples)
            limit, aim = BOUNDS.get((size, pattern), (0.0, 0.0))
            if limit:
                report.compare(case, OURS, LOOP, better=Better.HIGHER, limit=limit, aim=aim)
            report.add(case, "CPU ms/GB", {n: s.cpu_ms_per_gb[1:] for n, s in spent.items()})
            report.add(case, "lo bytes/byte", {n: s.lo_share[1:] for n, s in spent.items()})
    measure_peers(report, options, shared_memory, size, transports)


def measure_peers(
    report: Report, options: argparse.Namespace, shared_memory: SharedMemory, size: int, transports: str
) -> None:
    """UCX's own test and NIXL, as far as they are installed."""
    nbytes = options.mib * KIB * KIB
    perftest, nixl = find_perftest(), nixl_python(options)
    if perftest is not None:
        run = functools.partial(put_bandwidth, perftest, transports, size, nbytes)
        case = case_name(shared_memory, size, Pattern.CONTIGUOUS)
        report.add(case, "GB/s", interleave(options.rounds, {PERFTEST: run}, f"{case}, {PERFTEST}"))
    if nixl.exists():
        for pattern, rates in measure_nixl(nixl, transports, nbytes, size, options.rounds).items():
            report.add(case_name(shared_memory, size, pattern), "GB/s", {NIXL: rates})


def note_absent(report: Report, options: argparse.Namespace) -> None:
    """Say which peers are not installed here, and how they would be."""
    if find_perftest() is None:
        report.absent.append(Absence(PERFTEST, "the package libucx, which ucxx brings, is not installed"))
    python = nixl_python(options)
    if not python.exists():
        environment = python.parents[1]
        report.absent.append(
            Absence(NIXL, f"no {python}; python -m venv {environment} && {environment}/bin/{NIXL_INSTALL}")
        )


def nixl_python(options: argparse.Namespace) -> Path:
    """Of the environment that NIXL is looked for in."""
    python: Path = options.peers / "nixl" / "bin" / "python"
    return python


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="copies of each contender and case (%(default)s)")
    parser.add_argument("--mib", type=int, default=512, help="MiB of each cache, copied whole (%(default)s)")
    parser.add_argument("--cma", action="store_true", help="measure shared memory as well")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="environments of peers (%(default)s)")
    output_options(parser)
    options = parser.parse_args()

    report = Report(
        "kv_transfer",
        "How fast do KV blocks move between two processes, against a bare loop of UCX puts?",
        {"rounds": options.rounds, "mib": options.mib},
    )
    for shared_memory in (SharedMemory.OFF, SharedMemory.CMA)[: 1 + options.cma]:
        for size in SIZES:
            measure(report, options, shared_memory, size)
    note_absent(report, options)
    report.notes += [
        "lo bytes/byte: 1 means that all bytes went over tcp, 0 that none did.",
        f"{NIXL} and {PERFTEST} run after the other two, not in turn with them: their threads spin.",
    ]
    publish(report, options.out)


if __name__ == "__main__":
    main()
