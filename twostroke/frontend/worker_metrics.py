"""What Prometheus scrapes of one worker: its last heartbeat, read at each scrape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.frontend.metrics import add_histogram
from twostroke.protocol.durations import BUCKETS_S, HandoverTimes
from twostroke.protocol.worker import BlockCounts, Role, WorkerCounters, WorkerLoad

_COUNTERS = {
    "steps": "Engine steps",
    "prompt_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens made",
    "preemptions": "Sequences set back to recompute",
    "dropped_messages": "Messages dropped for a wrong epoch, key or form",
    "transfers_done": "KV transfers completed",
    "transfers_failed": "KV transfers ended otherwise",
    "transfer_bytes": "Bytes of KV moved",
}


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker as it was heard last.

    Attributes:
        role: Its role.
        worker: Its address, or another name that tells it from others.
        load: From its last heartbeat.
        step_age_s: Seconds since its engine loop last went round, likewise.
    """

    role: Role
    worker: str
    load: WorkerLoad
    step_age_s: float


class WorkerCollector(Collector):
    """Exports one worker.

    Args:
        sample: The worker as it was heard last; None before it is ready.
    """

    def __init__(self, sample: Callable[[], WorkerSample | None]) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """Nothing before the worker is ready; then one sample each, and one for each state of blocks."""
        sample = self._sample()
        if sample is None:
            return
        labels, names = ["role", "worker"], [str(sample.role), sample.worker]
        yield _blocks(sample.load.blocks, labels, names)
        for name, help_text, value in _gauges(sample):
            gauge = GaugeMetricFamily(f"twostroke_worker_{name}", help_text, labels=labels)
            gauge.add_metric(names, value)
            yield gauge
        yield from _counters(sample.load.counters, labels, names)
        if sample.load.counters.handover:
            yield _handover(sample.load.counters.handover, labels, names)


def _blocks(counts: BlockCounts, labels: list[str], names: list[str]) -> Metric:
    blocks = GaugeMetricFamily("twostroke_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
    for state in BlockCounts.__struct_fields__:
        blocks.add_metric([*names, state], getattr(counts, state))
    return blocks


def _gauges(sample: WorkerSample) -> list[tuple[str, str, float]]:
    load = sample.load
    return [
        ("running", "Sequences in the batch", load.running),
        ("waiting", "Sequences not admitted yet", load.waiting),
        ("waiting_tokens", "Prompt tokens not computed yet", load.waiting_tokens),
        ("admitting", "1 if it takes new work", float(load.admitting)),
        ("step_age_seconds", "Time since the engine loop last went round", sample.step_age_s),
    ]


def _counters(counters: WorkerCounters, labels: list[str], names: list[str]) -> Iterator[Metric]:
    for name, help_text in _COUNTERS.items():
        counter = CounterMetricFamily(f"twostroke_worker_{name}", help_text, labels=labels)
        counter.add_metric(names, getattr(counters, name))
        yield counter


def _handover(times: HandoverTimes, labels: list[str], names: list[str]) -> Metric:
    family = HistogramMetricFamily(
        "twostroke_handover_seconds",
        "Parts of the way from the end of prefill to the first decode step",
        labels=[*labels, "part"],
    )
    for part, histogram in times.items():
        add_histogram(family, [*names, part], BUCKETS_S, histogram.counts, histogram.sum_s)
    return family
