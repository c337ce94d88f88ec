"""From records to figures; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from twostroke.cli.bench.record import Outcome, RequestRecord
from twostroke.protocol.errors import ConfigError

MS = 1e3


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of `ordered` (ascending, not empty) lies, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds.

    Attributes:
        count: How many values.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Self | None:
        """The distribution of the values that are there; None without any."""
        values = sorted(value * MS for value in seconds if value is not None)
        if not values:
            return None
        p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
        return cls(len(values), sum(values) / len(values), p50, p90, p99, values[-1])


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds that a request must keep to count as good; None limits nothing.

    Attributes:
        itl: Of the 99th percentile of the request's own gaps.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `ttft=500,itl=50`.

        Raises:
            ConfigError: A name is unknown, given twice, or its limit no positive number.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in cls.__slots__ or name in limits:
                raise ConfigError(f"--slo: expected each of {', '.join(cls.__slots__)} at most once, not {part!r}")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if not limits[name] > 0:
                raise ConfigError(f"--slo: {name} needs milliseconds above 0, not {value!r}")
        return cls(**limits)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request finished and kept every limit."""
        if record.outcome is not Outcome.DONE:
            return False
        gaps = sorted(record.itl_s)
        itl = percentile(gaps, 0.99) if gaps else None
        pairs = (
            (self.ttft, record.ttft_s), (self.itl, itl), (self.tpot, record.tpot_s), (self.e2e, record.e2e_s)
        )  # fmt: skip
        return all(limit is None or value is None or value * MS <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run.

    Attributes:
        wall_s: From the first request's time to the last sign of any.
        errors: Failed requests by kind.
        requests_per_s: Finished ones.
        output_tokens_per_s: Of all requests, finished or not.
        good_requests: Those within the SLO; None without one.
    """

    wall_s: float
    done: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    good_requests: int | None
    goodput_per_s: float | None
    good_share: float | None


def summarise(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """The figures of `records`. Latencies are those of requests that finished; TTFT and ITL of all that streamed."""
    outcomes = Counter(record.outcome for record in records)
    done = [record for record in records if record.outcome is Outcome.DONE]
    streamed = [record for record in records if record.outcome is not Outcome.FAILED]
    wall_s = _wall_s(records)
    tokens = sum(record.tokens for record in records)
    good = None if slo is None else sum(map(slo.met_by, records))
    return Summary(
        wall_s=wall_s,
        done=outcomes[Outcome.DONE],
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=tokens,
        requests_per_s=_rate(len(done), wall_s),
        output_tokens_per_s=_rate(tokens, wall_s),
        ttft_ms=Distribution.of(record.ttft_s for record in streamed),
        itl_ms=Distribution.of(gap for record in streamed for gap in record.itl_s),
        tpot_ms=Distribution.of(record.tpot_s for record in done),
        e2e_ms=Distribution.of(record.e2e_s for record in done),
        good_requests=good,
        goodput_per_s=None if good is None else _rate(good, wall_s),
        good_share=None if good is None else _rate(good, len(records)),
    )


def _wall_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    last = max(max(record.due, record.ended or 0.0, *record.chunk_times[-1:]) for record in records)
    return last - min(record.due for record in records)


def _rate(count: float, over: float) -> float:
    return count / over if over > 0 else 0.0
