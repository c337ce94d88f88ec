"""What a server exports of its worker."""

from prometheus_client import CollectorRegistry, generate_latest

from twostroke.frontend.worker_metrics import WorkerCollector, WorkerSample
from twostroke.protocol.durations import DurationHistogram, HandoverPart
from twostroke.protocol.worker import BlockCounts, Role, WorkerCounters, WorkerLoad

LABELS = 'role="context",worker="tcp://10.0.0.1:7000"'


def scrape(sample: WorkerSample | None) -> list[str]:
    """The lines of one scrape, comments left out."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: sample))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_every_state_of_blocks_is_exported() -> None:
    """Six samples, which sum to the worker's blocks."""
    load = WorkerLoad(blocks=BlockCounts(free=1, cached=2, active=3, leased=4, reserved=5, quarantined=6))
    lines = scrape(WorkerSample(Role.CONTEXT, "tcp://10.0.0.1:7000", load, 0.0))
    blocks = [line for line in lines if line.startswith("twostroke_kv_blocks{")]
    assert len(blocks) == 6
    assert sum(float(line.split()[-1]) for line in blocks) == load.blocks.total
    assert 'twostroke_kv_blocks{role="context",state="leased",worker="tcp://10.0.0.1:7000"} 4.0' in blocks


def test_counters_and_gauges_come_from_the_heartbeat() -> None:
    """One sample a counter, and how old the engine's last step is."""
    load = WorkerLoad(running=2, counters=WorkerCounters(steps=7, transfer_bytes=4096))
    lines = scrape(WorkerSample(Role.CONTEXT, "tcp://10.0.0.1:7000", load, 1.5))
    assert f"twostroke_worker_running{{{LABELS}}} 2.0" in lines
    assert f"twostroke_worker_steps_total{{{LABELS}}} 7.0" in lines
    assert f"twostroke_worker_transfer_bytes_total{{{LABELS}}} 4096.0" in lines
    assert f"twostroke_worker_step_age_seconds{{{LABELS}}} 1.5" in lines
    for name in set(WorkerCounters.__struct_fields__) - {"handover"}:
        assert any(line.startswith(f"twostroke_worker_{name}_total{{") for line in lines)


def test_parts_of_hand_overs_are_histograms() -> None:
    """Buckets count up; parts that the worker's role does not know are not there."""
    times = {HandoverPart.WRITE: DurationHistogram()}
    for seconds in (0.0004, 0.003, 60.0):
        times[HandoverPart.WRITE].observe(seconds)
    lines = scrape(WorkerSample(Role.CONTEXT, "w", WorkerLoad(counters=WorkerCounters(handover=times)), 0.0))
    samples = [line.removeprefix("twostroke_handover_seconds_") for line in lines if "handover" in line]
    names = 'part="write",role="context",worker="w"'
    assert f'bucket{{le="0.0005",{names}}} 1.0' in samples
    assert f'bucket{{le="0.005",{names}}} 2.0' in samples
    assert f'bucket{{le="+Inf",{names}}} 3.0' in samples
    assert f"sum{{{names}}} 60.0034" in samples
    assert not any("transfer" in line for line in samples)


def test_a_worker_that_is_not_ready_exports_nothing() -> None:
    """There is no load to tell yet, and zeros would be wrong."""
    assert scrape(None) == []
