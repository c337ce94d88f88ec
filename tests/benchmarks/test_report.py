"""The figures that benchmarks publish are the ones that were measured."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.report import Better, Report, Verdict, interleave, publish


def _report() -> Report:
    report = Report("example", "How long does it take?", {"rounds": 3})
    report.add("per request", "us", {"ours": [10.0, 30.0, 20.0], "peer": [20.0, 20.0, 20.0]})
    return report


def test_contenders_take_turns() -> None:
    """Each round measures all of them once, in order, so that drift meets them alike."""
    turns: list[str] = []

    def measure(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    samples = interleave(2, {"a": lambda: measure("a"), "b": lambda: measure("b")}, "example")
    assert turns == ["a", "b", "a", "b"]
    assert samples == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.parametrize(
    ("better", "limit", "aim", "verdict"),
    [
        (Better.LOWER, 1.3, 1.0, Verdict.AIM),
        (Better.LOWER, 1.3, 0.9, Verdict.LIMIT),
        (Better.LOWER, 0.9, 0.8, Verdict.MISSED),
        (Better.HIGHER, 0.9, 1.0, Verdict.AIM),
        (Better.HIGHER, 0.9, 1.1, Verdict.LIMIT),
        (Better.HIGHER, 1.1, 1.2, Verdict.MISSED),
    ],
)
def test_a_ratio_is_judged_by_what_was_promised(better: Better, limit: float, aim: float, verdict: Verdict) -> None:
    """The ratio is the median of the rounds' ratios: 0.5, 1.5 and 1.0."""
    comparison = _report().compare("per request", "ours", "peer", better=better, limit=limit, aim=aim)
    assert comparison.ratio == 1.0
    assert comparison.verdict is verdict


def test_what_was_not_measured_cannot_be_compared() -> None:
    """A missing peer is an error of the script, not a ratio."""
    with pytest.raises(KeyError, match="dynamo was not measured"):
        _report().compare("per request", "ours", "dynamo", better=Better.LOWER, limit=1, aim=1)


def test_publish_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON reads back as the report; the picture is a PNG; the table shows medians and verdicts."""
    report = _report()
    report.compare("per request", "ours", "peer", better=Better.LOWER, limit=1.3, aim=0.9)
    publish(report, tmp_path)
    assert msgspec.json.decode((tmp_path / "example.json").read_bytes(), type=Report) == report
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "20" in shown
    assert "within the limit" in shown
