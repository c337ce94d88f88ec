"""The executor benchmark measures real forms around a real worker, and what it reports adds up."""

import argparse
import time
from pathlib import Path

import pytest

from benchmarks import executor_overhead
from benchmarks.executor_floors import batch_bytes, request_bytes
from benchmarks.executor_forms import Load
from benchmarks.instant_engine import MODEL, VOCABULARY, InstantEngine, load_instant_runner
from benchmarks.zmq_echo import echo
from tests.support.engine_requests import make_request, run_until_idle, tokens_of
from twostroke.engine.engine import Engine
from twostroke.protocol.config import EngineConfig, KVCacheConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.worker import Role
from twostroke.worker.loading import MakeEngine

CONFIG = EngineConfig(kv_cache=KVCacheConfig(num_blocks=64))


@pytest.mark.parametrize("make_engine", [InstantEngine, Engine])
def test_an_instant_engine_counts_up(make_engine: MakeEngine) -> None:
    """The token after `t` is `t + 1`, whatever else runs, and only the length ends a sequence; so with the runner."""
    engine = make_engine(load_instant_runner(MODEL, CONFIG, print), CONFIG, Role.AGGREGATED)
    engine.add(make_request(1, [5, 6], max_tokens=4))
    engine.add(make_request(2, range(40), max_tokens=3, n=2))
    engine.add(make_request(3, [VOCABULARY - 1], max_tokens=2))
    outputs = run_until_idle(engine)
    assert tokens_of(outputs[1]) == [7, 8, 9, 10]
    assert tokens_of([output for output in outputs[2] if output.key.index == 1]) == [40, 41, 42]
    assert tokens_of(outputs[3]) == [0, 1]
    assert engine.load().blocks.total == 64


def test_an_instant_engine_gives_up_what_is_aborted() -> None:
    """An aborted sequence has one final event; the others go on."""
    engine = InstantEngine(load_instant_runner(MODEL, CONFIG, print), CONFIG, Role.AGGREGATED)
    engine.add(make_request(1, [5], max_tokens=4, n=2))
    engine.step()
    assert engine.abort(1, 1) == [SequenceKey(1, 1)]
    assert engine.abort(2) == []
    outputs = run_until_idle(engine)[1]
    assert tokens_of([output for output in outputs if output.key.index == 0], 1) == [7, 8, 9]
    assert [(output.key.index, output.offset) for output in outputs if output.error is not None] == [(1, 1)]
    assert not engine.unfinished


def test_the_bare_queue_answers_with_as_many_bytes_as_asked() -> None:
    """Requests for nothing get nothing; the child ends with the context."""
    with echo() as queue:
        queue.send(request_bytes(8), 0, 10)
        queue.send(request_bytes(8), 2, 1000)
        assert [len(queue.receive()) for _ in range(2)] == [1000, 1000]
    assert 10 < batch_bytes(512) - batch_bytes(511) < 40


@pytest.mark.cluster
def test_every_form_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny run has figures of all contenders, and a positive CPU time of each process."""
    monkeypatch.setattr(executor_overhead, "PACED_TOKENS", 3)
    monkeypatch.setattr(executor_overhead, "LONE_REQUESTS", 10)
    arguments = argparse.Namespace(rounds=1, streams=[1, 4], tokens=64, requests=8, out=tmp_path)
    report = executor_overhead.run(arguments)
    forms = ["in-process", "ipc", "remote"]
    for name in [*forms, "instant engine alone", "real engine alone", "bare pyzmq"]:
        assert report.of(f"tokens, {name}", "4 streams").median > 0
        assert report.of("tokens, 4 streams", name).median > 0
        assert report.of("requests, 1 stream", name).median > 0
    for name in ("ipc", "remote"):
        cases = [f"paced tokens, {name}{part}" for part in (" frontend", " worker", "")]
        parts = [report.of(case, "4 streams").median for case in cases]
        assert min(parts) > 0
        assert parts[2] == pytest.approx(parts[0] + parts[1])
    assert [pair.case for pair in report.comparisons] == [
        "added to a lone request",
        *(f"{what}, {name}" for what in ("paced tokens", "tokens") for name in forms),
    ]


def test_a_paced_engine_waits_for_its_turn() -> None:
    """The seed is the pace of a step in milliseconds."""
    engine = InstantEngine(load_instant_runner(MODEL, CONFIG, print), CONFIG, Role.AGGREGATED)
    engine.add(make_request(1, [5], max_tokens=3, seed=20))
    begun = time.monotonic()
    run_until_idle(engine)
    assert time.monotonic() - begun > 0.039


def test_loads_count_what_they_ask_for() -> None:
    """All requests and all tokens, over all streams."""
    load = Load(streams=3, requests=4, tokens=5)
    assert (load.all_requests, load.all_tokens) == (12, 60)
