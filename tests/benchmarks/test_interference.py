"""The report of the interference benchmark: promised ratios, the load, and who did not keep up with it."""

from pathlib import Path

import pytest

from benchmarks.interference import COMPARED, DISAGGREGATED, P99, Bench, Contender, make_report
from benchmarks.long_prompts import Observed, OfferedLoad
from benchmarks.report import Verdict

LOAD = OfferedLoad(streams=6, stream_prompt=64, prompt=768, output=8, every_s=6.4, arrivals=5)


def _seen(gap_s: float, growth_s: float = 0.0) -> Observed:
    """Gaps all alike; each long prompt waits `growth_s` longer than the one before."""
    waits = [2.0 + growth_s * number for number in range(LOAD.arrivals)]
    return Observed([gap_s] * 64, waits, LOAD.window_s, LOAD.every_s)


def _bench(**growth_s: float) -> Bench:
    gaps = dict(zip((one.name for one in COMPARED), (0.1, 0.4, 1.0), strict=True))
    observed = {name: [_seen(gap, growth_s.get(name, 0.0))] for name, gap in gaps.items()}
    return Bench(Path(), "bfloat16", LOAD, Path(), observed)


def test_ratios_are_of_the_99th_percentile() -> None:
    """One comparison for each chunk that users run, with the verdict on it."""
    report = make_report(_bench(), {})
    assert [(pair.peer, pair.verdict) for pair in report.comparisons] == [
        ("aggregated, chunk 512", Verdict.LIMIT),
        ("aggregated, chunk 2048", Verdict.AIM),
    ]
    assert [pair.ratio for pair in report.comparisons] == pytest.approx([0.25, 0.1])
    assert report.of(P99, DISAGGREGATED).samples == pytest.approx([100.0])


def test_the_load_is_stated_and_that_all_kept_up() -> None:
    """Without that a ratio says nothing."""
    load, kept_up = make_report(_bench(), {}).notes
    assert load == ("load: 6 streams, and a prompt of 768 tokens every 6.4 s (5 in 32 s), each answered with 8 tokens")
    assert kept_up == "all kept up with that"


def test_who_falls_behind_is_named() -> None:
    """A backlog that grows by more than a tenth of the pace."""
    notes = make_report(_bench(disaggregated=0.7), {}).notes
    assert notes[1] == "did not keep up with that: disaggregated"


def test_everyone_gets_two_threads() -> None:
    """By its settings, which is what the comparison rests on."""
    assert [one.threads for one in (Contender("one", 512), Contender("two", 512, servers=2))] == [2, 1]
