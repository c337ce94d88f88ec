"""The admin port and the router's metrics."""

import httpx
from prometheus_client import generate_latest

from router.admin import create_admin_app
from tests.support.fake_cluster import FakeCluster, fake_cluster, until
from twostroke.protocol.worker import BlockCounts, WorkerLoad


def client(cluster: FakeCluster) -> httpx.AsyncClient:
    """Speaks to the admin application."""
    transport = httpx.ASGITransport(app=create_admin_app(cluster.executor))
    return httpx.AsyncClient(transport=transport, base_url="http://admin")


async def test_ledger() -> None:
    """Open and ended entries with their phases, workers and times."""
    async with fake_cluster() as cluster, client(cluster) as http:
        cluster.send()
        cluster.context().finish(cluster.context().last, 0, 7)
        open_id, _ = cluster.send(prompt_tokens=5)
        cluster.context().hand_over(cluster.context().last, cached=2)
        answer = (await http.get("/ledger")).json()
        assert answer["counts"] == {"handoff": 1, "done": 1}
        (entry,) = answer["open"]
        assert entry["client_id"] == f"{open_id:016x}"
        assert [phase["phase"] for phase in entry["phases"]] == ["queued", "context", "handoff"]
        assert (entry["context_worker"], entry["generation_worker"]) == ("tcp://context:1", "tcp://generation:1")
        assert (entry["prompt_tokens"], entry["cached_tokens"], entry["error"]) == (5, 2, None)
        assert abs(sum(phase["seconds"] for phase in entry["phases"]) - entry["age_s"]) < 1e-6
        assert [(ended["phase"], ended["output_tokens"]) for ended in answer["ended"]] == [("done", 1)]
        assert (await http.get("/ledger?limit=0")).json()["ended"] == []
        refusal = await http.get("/ledger?limit=all")
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "limit")


async def test_workers() -> None:
    """Every address with state and reason; what an attached worker reported."""
    async with fake_cluster() as cluster, client(cluster) as http:
        cluster.send()
        cluster.workers.pop("tcp://generation:1").die("killed by signal 9")
        await until(lambda: any(slot.failures for slot in cluster.executor.pool.slots()))
        answer = (await http.get("/workers")).json()
        assert (answer["ready"], answer["waiting"]) == (False, 0)
        context, generation = answer["workers"]
        assert (context["state"], context["epoch"], context["placed"]) == ("live", 1, 1)
        assert (context["description"]["role"], context["description"]["layout"]["block_size"]) == ("context", 16)
        assert context["load"]["blocks"]["free"] == 64
        assert (generation["state"], generation["epoch"]) == ("attaching", None)
        assert "nobody listens" in generation["reason"]
        assert (await http.get("/health")).status_code == 200


async def test_metrics() -> None:
    """Ledger phases, attempts, hand-over times, and each worker's block states."""
    async with fake_cluster() as cluster:
        cluster.generation().load = WorkerLoad(running=2, blocks=BlockCounts(free=60, reserved=4))
        cluster.send()
        cluster.context().hand_over(cluster.context().last)
        cluster.generation().tokens(cluster.generation().last, 1, 8)
        cluster.send()

        def value(name: str, **labels: str) -> float | None:
            return cluster.registry.get_sample_value(name, labels)

        names = {"role": "generation", "worker": "tcp://generation:1"}
        assert value("twostroke_router_requests", phase="generation") == 1
        assert value("twostroke_router_requests", phase="context") == 1
        assert value("twostroke_router_attempts_total") == 2
        assert value("twostroke_router_handover_seconds_count") == 1
        assert value("twostroke_kv_blocks", **names, state="free") == 60
        assert value("twostroke_kv_blocks", **names, state="reserved") == 4
        assert value("twostroke_worker_state", **names, state="live") == 1
        assert value("twostroke_worker_placed", **names) == 2
        assert b"twostroke_router_retries_total 0.0" in generate_latest(cluster.registry)


async def test_unknown_paths_and_wrong_methods_are_json_too() -> None:
    """In the same form as on the public port."""
    async with fake_cluster() as cluster, client(cluster) as http:
        missing, wrong = await http.get("/nope"), await http.post("/workers")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "GET /nope: Not Found")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
