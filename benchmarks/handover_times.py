"""What a server says of its hand-overs, `twostroke_handover_seconds`, request by request.

The histograms count up; the difference of two scrapes around one request is that request's own.
"""

import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from twostroke.protocol.durations import HandoverPart

_HEARTBEATS_S = 5.0
"""A worker tells its server of what it did within 250 ms."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PartTotals:
    """Of one part, since the server's start."""

    count: int = 0
    sum_s: float = 0.0


Totals = dict[HandoverPart, PartTotals]


def parse_totals(metrics: str) -> Totals:
    """The parts in a server's metrics."""
    counts: dict[str, float] = {}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples if family.name == "twostroke_handover_seconds" else ():
            if sample.name.endswith("_count"):
                counts[sample.labels["part"]] = sample.value
            elif sample.name.endswith("_sum"):
                sums[sample.labels["part"]] = sample.value
    return {HandoverPart(part): PartTotals(int(counts[part]), sums[part]) for part in counts}


def scrape(server: str) -> Totals:
    """The parts now, of the server at this URL."""
    return parse_totals(httpx.get(f"{server}/metrics", trust_env=False, timeout=10.0).text)


def await_next(server: str, before: Totals, last: HandoverPart) -> dict[HandoverPart, float]:
    """Seconds of each part of the one hand-over that ended since `before` was scraped.

    Args:
        server: URL.
        before: What it said before the request.
        last: The part that ends last there.

    Raises:
        TimeoutError: No hand-over ended.
    """
    deadline = time.monotonic() + _HEARTBEATS_S
    none = PartTotals()
    while time.monotonic() < deadline:
        now = scrape(server)
        if now.get(last, none).count > before.get(last, none).count:
            return {part: total.sum_s - before.get(part, none).sum_s for part, total in now.items()}
        time.sleep(_POLL_S)
    raise TimeoutError(f"{server} told of no hand-over in {_HEARTBEATS_S:g} s")
