"""What Prometheus scrapes from the router: its ledger, and what its workers reported with their last heartbeat."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.ledger import ENDED, Ledger, LedgerPhase
from router.workers import AttachedWorker, WorkerSlot, WorkerState
from twostroke.frontend.metrics import Durations
from twostroke.protocol.worker import BlockCounts

HANDOVER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RouterMetrics(Collector):
    """Counts that requests make as they go: plain numbers, made into metrics at each scrape.

    Args:
        registry: Where the metrics are registered.

    Attributes:
        attempts: Placements on workers.
        retries: Context phases placed again.
        refused: Requests refused at once.
        handover: From the context worker's hand-over to the generation worker's first token.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = 0
        self.retries = 0
        self.refused = 0
        self.handover = Durations(HANDOVER_BUCKETS_S)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Everything, as Prometheus sees it."""
        yield CounterMetricFamily("twostroke_router_attempts", "Placements of a request on workers", self.attempts)
        retries = "Context phases placed again on another worker"
        yield CounterMetricFamily("twostroke_router_retries", retries, self.retries)
        refused = "Requests refused at once, for want of a worker"
        yield CounterMetricFamily("twostroke_router_refused", refused, self.refused)
        handover = HistogramMetricFamily(
            "twostroke_router_handover_seconds",
            "From the context worker's hand-over to the generation worker's first token",
        )
        self.handover.add_to(handover)
        yield handover


class LedgerCollector(Collector):
    """Requests by phase, read from the ledger at each scrape."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """Open requests now, and ended ones since the start."""
        open_now = GaugeMetricFamily("twostroke_router_requests", "Open requests by phase", labels=["phase"])
        counts = self._ledger.open_counts()
        ended = CounterMetricFamily("twostroke_router_requests_ended", "Requests that ended, by how", labels=["phase"])
        ended_counts = self._ledger.ended_counts()
        for phase in LedgerPhase:
            if phase in ENDED:
                ended.add_metric([phase], ended_counts[phase])
            else:
                open_now.add_metric([phase], counts[phase])
        yield open_now
        yield ended


class WorkersCollector(Collector):
    """State, load and KV blocks of each worker, read from the pool at each scrape.

    Args:
        slots: All worker addresses, attached or not.
    """

    def __init__(self, slots: Callable[[], Iterable[WorkerSlot]]) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        """One sample a worker, or a worker and state."""
        labels = ["role", "worker"]
        state = GaugeMetricFamily("twostroke_worker_state", "1 for the state it is in", labels=[*labels, "state"])
        blocks = GaugeMetricFamily("twostroke_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
        placed = GaugeMetricFamily("twostroke_worker_placed", "Sequences placed there by this router", labels=labels)
        running = GaugeMetricFamily("twostroke_worker_running", "Sequences in the batch", labels=labels)
        waiting = GaugeMetricFamily("twostroke_worker_waiting", "Sequences not admitted yet", labels=labels)
        admitting = GaugeMetricFamily("twostroke_worker_admitting", "1 if it takes new work", labels=labels)
        for slot in list(self._slots()):
            names = [str(slot.role), slot.address]
            for known in WorkerState:
                state.add_metric([*names, known], float(slot.state is known))
            worker = slot.worker
            if worker is not None:
                _add_blocks(blocks, names, worker)
                load = worker.link.load
                placed.add_metric(names, worker.sequences)
                running.add_metric(names, load.running)
                waiting.add_metric(names, load.waiting)
                admitting.add_metric(names, float(load.admitting))
        yield from (state, blocks, placed, running, waiting, admitting)


def _add_blocks(blocks: GaugeMetricFamily, names: list[str], worker: AttachedWorker) -> None:
    counts = worker.link.load.blocks
    for name in BlockCounts.__struct_fields__:
        blocks.add_metric([*names, name], getattr(counts, name))
