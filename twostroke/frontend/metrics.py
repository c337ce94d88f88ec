"""What a frontend counts and times, for Prometheus.

Latencies are as the client sees them, less the network: from the arrival of the request to the moment that a token's
text is ready to be written. Worker-side numbers come from the workers' heartbeats and are exported elsewhere.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class FrontendMetrics:
    """The instruments of one frontend.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "twostroke_requests",
            "Requests ended, by endpoint and HTTP status (499: the client left; errors after the first byte of a "
            "stream count under the status they would have had).",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge("twostroke_requests_in_flight", "Requests being served.", registry=registry)
        self.prompt_tokens = Counter(
            "twostroke_prompt_tokens", "Prompt tokens of answered requests.", registry=registry
        )
        self.cached_tokens = Counter(
            "twostroke_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.output_tokens = Counter("twostroke_output_tokens", "Tokens made.", registry=registry)
        self.time_to_first_token = Histogram(
            "twostroke_time_to_first_token_seconds",
            "From the arrival of a request to the first token of each of its sequences.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "twostroke_inter_token_latency_seconds",
            "Between the tokens of one sequence; several that arrive together share the time evenly and count once.",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "twostroke_request_duration_seconds",
            "From the arrival of a request to its end, by endpoint.",
            ["endpoint"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )


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

    def tokens(self, count: int) -> None:
        """`count` tokens have arrived together."""
        if not count:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now
        self._metrics.output_tokens.inc(count)

    def prompt(self, tokens: int, cached: int) -> None:
        """The sequence is whole; its prompt had `tokens`, `cached` of them in the prefix cache."""
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.cached_tokens.inc(cached)


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
        metrics.in_flight.inc()

    def sequence(self) -> SequenceTimer:
        """The timer of one of its sequences."""
        return SequenceTimer(self._metrics, self._arrived)

    def ended(self, status: int) -> None:
        """The request ended with HTTP `status`."""
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self._endpoint, str(status)).inc()
        self._metrics.duration.labels(self._endpoint).observe(time.monotonic() - self._arrived)
