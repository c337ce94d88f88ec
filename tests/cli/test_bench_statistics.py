"""From records to figures, with values computed by hand."""

import pytest

from twostroke.cli.bench.record import Outcome, RequestRecord
from twostroke.cli.bench.statistics import Distribution, Slo, percentile, summarise
from twostroke.protocol.errors import ConfigError


def record(due: float, *chunks: float, tokens: int = 0, ended: bool = True, error: str | None = None) -> RequestRecord:
    """A request that ended with its last chunk."""
    end = (chunks[-1] if chunks else due) if ended else None
    return RequestRecord(due, list(chunks), end, prompt_tokens=10, output_tokens=tokens, error=error)


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (0.9, 3.7), (1, 4)])
def test_percentiles_lie_between_neighbours(share: float, value: float) -> None:
    """As numpy's default."""
    assert percentile([1, 2, 3, 4], share) == pytest.approx(value)


def test_a_distribution_leaves_out_what_is_not_there() -> None:
    """A request without a token has no TTFT."""
    found = Distribution.of([0.002, None, 0.001])
    assert found is not None
    assert (found.count, found.most) == (2, 2)
    assert [found.mean, found.p50] == pytest.approx([1.5, 1.5])
    assert Distribution.of([None]) is None


def test_latencies_count_from_when_a_request_was_due() -> None:
    """TTFT to the first chunk, ITL between chunks, TPOT over tokens (a chunk may hold several)."""
    one = record(10.0, 10.5, 10.6, 10.9, tokens=5)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.itl_s == pytest.approx([0.1, 0.3])
    assert one.tpot_s == pytest.approx(0.1)
    assert one.e2e_s == pytest.approx(0.9)


def test_a_request_of_one_token_has_no_time_per_further_token() -> None:
    """Nor a gap."""
    assert record(0.0, 1.0, tokens=1).tpot_s is None
    assert record(0.0, 1.0, tokens=1).itl_s == []


def test_a_summary_counts_every_request_once() -> None:
    """Done, failed by kind, and those that Ctrl-C caught; their tokens count as output too."""
    records = [
        record(0.0, 1.0, 2.0, tokens=2),
        record(0.0, error="http 503"),
        record(1.0, error="http 503"),
        record(1.0, 3.0, 4.0, 5.0, ended=False),
    ]
    found = summarise(records)
    assert (found.done, found.failed, found.unfinished) == (1, 2, 1)
    assert found.errors == {"http 503": 2}
    assert (found.wall_s, found.output_tokens, found.output_tokens_per_s) == (5.0, 5, 1.0)
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.goodput_per_s is None
    assert [one.outcome for one in records] == [Outcome.DONE, Outcome.FAILED, Outcome.FAILED, Outcome.UNFINISHED]


def test_goodput_counts_requests_that_kept_every_limit() -> None:
    """Failed and unfinished ones never do."""
    slo = Slo.parse("ttft=500, itl=50")
    records = [
        record(0.0, 0.4, 0.44, tokens=2),
        record(0.0, 0.6, 0.64, tokens=2),  # its first token is late
        record(0.0, 0.4, 0.5, tokens=2),  # its second one is
        record(0.0, 0.4, tokens=1, error="timeout"),
        record(0.0, 0.4, ended=False),
    ]
    found = summarise(records, slo)
    assert (found.good_requests, found.good_share) == (1, 0.2)
    assert found.goodput_per_s == pytest.approx(1 / 0.64)


@pytest.mark.parametrize("text", ["ttft", "ttft=0", "ttft=fast", "speed=1", "itl=1,itl=2", ""])
def test_a_wrong_slo_is_refused(text: str) -> None:
    """With the option's name."""
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


def test_nothing_measured_is_no_error() -> None:
    """Ctrl-C during the warm-up."""
    found = summarise([], Slo(ttft=1.0))
    assert (found.done, found.wall_s, found.goodput_per_s, found.ttft_ms) == (0, 0.0, 0.0, None)
