"""The benchmark of hand-overs reads what a server counted, and its model is as large as it says."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks import handover_times
from benchmarks.demo_kv_model import BLOCK_BYTES, BLOCK_TOKENS, save_demo_kv_model
from benchmarks.handover_times import PartTotals, await_next, parse_totals
from twostroke.frontend.worker_metrics import WorkerCollector, WorkerSample
from twostroke.protocol.durations import DurationHistogram, HandoverPart
from twostroke.protocol.worker import Role, WorkerCounters, WorkerLoad


def metrics_of(*seconds: float) -> str:
    """A server's metrics after flushes of these durations."""
    times = {HandoverPart.FLUSH: DurationHistogram()}
    for one in seconds:
        times[HandoverPart.FLUSH].observe(one)
    sample = WorkerSample(Role.CONTEXT, "w", WorkerLoad(counters=WorkerCounters(handover=times)), 0.0)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: sample))
    return generate_latest(registry).decode()


def test_parts_are_read_from_a_servers_metrics() -> None:
    """Count and sum of each part that the server knows."""
    assert parse_totals(metrics_of(0.5, 0.25)) == {HandoverPart.FLUSH: PartTotals(2, 0.75)}


def test_the_hand_over_of_one_request_is_the_difference() -> None:
    """Scrapes go on until the server has heard of it."""
    answers = [parse_totals(metrics_of(*seconds)) for seconds in ((0.5,), (0.5,), (0.5, 0.25))]
    with mock.patch.object(handover_times, "scrape", side_effect=answers):
        before = handover_times.scrape("server")
        assert await_next("server", before, HandoverPart.FLUSH) == {HandoverPart.FLUSH: 0.25}


def test_a_hand_over_that_does_not_come_is_an_error() -> None:
    """With the server's name."""
    totals = parse_totals(metrics_of(0.5))
    quick = mock.patch.object(handover_times, "_HEARTBEATS_S", 0.1)
    told = mock.patch.object(handover_times, "scrape", return_value=totals)
    with quick, told, pytest.raises(TimeoutError, match=re.escape("http://server told of no hand-over")):
        await_next("http://server", totals, HandoverPart.FLUSH)


def test_the_models_blocks_are_the_demo_models(tmp_path: Path) -> None:
    """368640 bytes for 16 tokens, as its saved config has it."""
    config = json.loads((save_demo_kv_model(tmp_path) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert heads * 2 * 2 * BLOCK_TOKENS == BLOCK_BYTES == 368640
