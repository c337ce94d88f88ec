"""What a frontend counts and times, for Prometheus.

Latencies are as the client sees them, less the network: from the arrival of the request to the moment that a token's
text is ready to be written. Worker-side numbers come from the workers' heartbeats and are exported elsewhere.

The counts are plain numbers of the event loop, made into metrics when Prometheus asks: `prometheus_client`'s own
instruments take a lock and several microseconds each, and some of these change with every token.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Durations:
    """A histogram of seconds.

    Args:
        bounds: Upper bounds of the buckets but the last, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Report what was counted so far."""
        add_histogram(family, labels, self._bounds, self._counts, self._sum)


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], counts: Sequence[int], sum_s: float
) -> None:
    """Add a histogram with labels to its family.

    Args:
        family: Of the histogram.
        labels: Their values.
        bounds: Upper bounds of the buckets but the last, ascending.
        counts: What fell into each bucket, the last one included; not accumulated.
        sum_s: Of everything counted.
    """
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    family.add_metric(labels, list(zip(names, map(float, accumulate(counts)), strict=True)), sum_s)


class FrontendMetrics(Collector):
    """The counts of one frontend; used on its event loop only, scrapes included.

    Args:
        registry: Where they are registered.

    Attributes:
        requests: Requests that ended, by endpoint and status.
        in_flight: Requests being served.
        prompt_tokens: Of answered requests.
        cached_tokens: Those of them that the prefix cache held.
        output_tokens: Tokens made.
        time_to_first_token: By sequence.
        inter_token_latency: By message of tokens.
        duration: By endpoint.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.time_to_first_token = Durations(TTFT_BUCKETS_S)
        self.inter_token_latency = Durations(ITL_BUCKETS_S)
        self.duration: defaultdict[str, Durations] = defaultdict(lambda: Durations(DURATION_BUCKETS_S))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Everything, as Prometheus sees it."""
        requests = CounterMetricFamily(
            "twostroke_requests",
            "Requests ended, by endpoint and HTTP status (499: the client left; errors after the first byte of a "
            "stream count under the status they would have had).",
            labels=["endpoint", "status"],
        )
        for (endpoint, status), count in self.requests.items():
            requests.add_metric([endpoint, str(status)], count)
        yield requests
        yield GaugeMetricFamily("twostroke_requests_in_flight", "Requests being served.", self.in_flight)
        yield CounterMetricFamily("twostroke_prompt_tokens", "Prompt tokens of answered requests.", self.prompt_tokens)
        yield CounterMetricFamily(
            "twostroke_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", self.cached_tokens
        )
        yield CounterMetricFamily("twostroke_output_tokens", "Tokens made.", self.output_tokens)
        yield from self._latencies()

    def _latencies(self) -> Iterator[Metric]:
        first = HistogramMetricFamily(
            "twostroke_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each of its sequences.",
        )
        self.time_to_first_token.add_to(first)
        between = HistogramMetricFamily(
            "twostroke_inter_token_latency_seconds",
            "Between the tokens of one sequence; several that are read together share the time evenly and count once, "
            "as do all after the first of an answer that is not streamed.",
        )
        self.inter_token_latency.add_to(between)
        whole = HistogramMetricFamily(
            "twostroke_request_duration_seconds",
            "From the arrival of a request to its end, by endpoint.",
            labels=["endpoint"],
        )
        for endpoint, durations in self.duration.items():
            durations.add_to(whole, [endpoint])
        yield from (first, between, whole)


class SequenceTimer:
    """Measures the tokens of one sequence.

    Args:
        metrics: Where the measurements go.
        arrived: When its request arrived, in seconds of the monotonic clock.
    """

    def __init__(self, metrics: FrontendMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last: float | None = None

    def tokens(self, count: int, began: float | None) -> None:
        """`count` tokens have arrived together; the very first of the sequence came at `began`."""
        if not count:
            return
        self._metrics.output_tokens += count
        now = time.monotonic()
        if self._last is None:
            self._last = now if began is None else began
            self._metrics.time_to_first_token.observe(self._last - self._arrived)
            count -= 1
        if count:
            self._metrics.inter_token_latency.observe((now - self._last) / count)
            self._last = now

    def prompt(self, tokens: int, cached: int) -> None:
        """The sequence is whole; its prompt had `tokens`, `cached` of them in the prefix cache."""
        self._metrics.prompt_tokens += tokens
        self._metrics.cached_tokens += cached


class RequestTimer:
    """Measures one request.

    Args:
        metrics: Where the measurements go.
        endpoint: Label of the endpoint.
    """

    def __init__(self, metrics: FrontendMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._arrived = time.monotonic()
        metrics.in_flight += 1

    def sequence(self) -> SequenceTimer:
        """The timer of one of its sequences."""
        return SequenceTimer(self._metrics, self._arrived)

    def ended(self, status: int) -> None:
        """The request ended with HTTP `status`."""
        self._metrics.in_flight -= 1
        self._metrics.requests[self._endpoint, status] += 1
        self._metrics.duration[self._endpoint].observe(time.monotonic() - self._arrived)
