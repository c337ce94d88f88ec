"""How a request ends when its client, its time, its worker or the server does: one final event, and no work left."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.types import Message

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor, Script
from tests.support.waiting import until
from twostroke.executor.base import Health, HealthState
from twostroke.frontend import endpoint
from twostroke.frontend.app import in_flight_of
from twostroke.frontend.auth import ApiKeys
from twostroke.protocol.errors import ConfigError

BODY = {"prompt": "x", "max_tokens": 50}
HELD = Script(steps=[(40,), (41,), (42,)], hold=1)
"""One token, and then nothing until released."""


async def counted(client: httpx.AsyncClient, status: int) -> float:
    """How many completions ended with `status`, by the metrics."""
    text = (await client.get("/metrics")).text
    wanted = f'twostroke_requests_total{{endpoint="completions",status="{status}"}} '
    return sum(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(url: str, executor: FakeExecutor, *, stream: bool) -> None:
    """At once, streamed or not; counted as 499; nothing goes on in the engine."""
    executor.script = HELD
    async with httpx.AsyncClient(base_url=url) as client:
        leaving = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await until(lambda: executor.running)
        leaving.cancel()
        await until(lambda: not executor.running)
        assert executor.calls.aborts[0][0] == executor.calls.requests[0].key.client_id
        assert await counted(client, 499) == 1


async def test_a_client_that_leaves_while_it_sends_submits_nothing(url: str, executor: FakeExecutor) -> None:
    """Half a body is no request."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    async with httpx.AsyncClient(base_url=url) as client:
        async with asyncio.timeout(5):
            while await counted(client, 499) != 1:  # noqa: ASYNC110 - another process's view: only polling sees it
                await asyncio.sleep(0.01)
    assert executor.calls.requests == []


@pytest.mark.parametrize("first_token", [False, True])
async def test_a_request_out_of_time_is_a_504(make_app: MakeApp, executor: FakeExecutor, *, first_token: bool) -> None:
    """As a status before the first byte of a stream, as an event after it; the engine is told."""
    executor.script = Script(steps=[(40,), (41,)], hold=1 if first_token else 0)
    transport = httpx.ASGITransport(make_app(request_timeout_s=0.1))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    events = answer.text.split("\n\n")
    if first_token:
        assert answer.status_code == 200
        assert len([event for event in events if "error" in event]) == 1
        assert msgspec.json.decode(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the request did not end within 0.1 s"
    assert executor.calls.aborts == [(executor.calls.requests[0].key.client_id, None)]
    assert executor.calls.requests[0].deadline_s == 0.1


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_stalls_is_given_up(
    make_app: MakeApp, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    """Whether it never finishes its body or never reads its answer, the place is free again after the deadline."""
    monkeypatch.setattr(endpoint, "STALLED_S", 0.05)
    app = make_app(request_timeout_s=0.05, max_in_flight=1)
    never = asyncio.Event()
    sent: list[Message] = []
    body = [{"type": "http.request", "body": msgspec.json.encode({**BODY, "stream": True}), "more_body": False}]

    async def receive() -> Message:
        if body and not reads:
            return body.pop()
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if not reads:
            await never.wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert sent[0]["status"] == (504 if reads else 200)
    assert len(sent) == (2 if reads else 1)
    assert executor.running == 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_worker_that_dies_mid_stream_ends_it_with_one_error_event(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """The text so far, one error, no end mark."""
    executor.script = HELD
    answering = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": True}))
    await until(lambda: executor.running)
    await asyncio.sleep(0.02)
    executor.die("killed by signal 9")
    answer = await answering
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert [next(iter(msgspec.json.decode(event))) for event in events] == ["id", "error"]
    assert msgspec.json.decode(events[1])["error"]["message"] == "killed by signal 9"


async def test_the_stop_ends_streams_with_their_error_event(make_app: MakeApp, executor: FakeExecutor) -> None:
    """New requests get 503 and `/ready` turns; what runs is failed at the deadline, and nothing is left behind."""
    executor.script = HELD
    app = make_app()
    in_flight = in_flight_of(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        answering = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
        await until(lambda: executor.running)
        await asyncio.sleep(0.02)
        in_flight.stop_admitting()
        refused = await client.post("/v1/completions", json=BODY)
        ready = await client.get("/ready")
        in_flight.fail_pending()
        answer = await answering
    assert (refused.status_code, ready.status_code, ready.json()["state"]) == (503, 503, "stopping")
    assert answer.text.count('"error"') == 1
    assert "shutting down" in answer.text
    assert executor.running == 0


async def test_more_requests_than_allowed_get_429(make_app: MakeApp, executor: FakeExecutor) -> None:
    """The place of an ended request is free again."""
    executor.script = HELD
    transport = httpx.ASGITransport(make_app(max_in_flight=1))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        first = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: executor.running)
        second = await client.post("/v1/completions", json=BODY)
        executor.release()
        assert (await first).status_code == 200
        third = await client.post("/v1/completions", json=BODY)
    assert (second.status_code, second.headers["retry-after"], third.status_code) == (429, "1", 200)
    assert second.json()["error"]["code"] == "too_many_requests"


async def test_a_body_over_the_limit_is_a_413(make_app: MakeApp) -> None:
    """Announced in a header, or found while it is read."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 50

    transport = httpx.ASGITransport(make_app(max_body_bytes=100))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        announced = await client.post("/v1/completions", content=b" " * 101)
        streamed = await client.post("/v1/completions", content=chunks())
    assert (announced.status_code, streamed.status_code) == (413, 413)
    assert announced.json()["error"]["code"] == "request_too_large"


async def test_tokens_that_wait_together_are_one_event(make_app: MakeApp, executor: FakeExecutor) -> None:
    """A client that reads slowly gets fewer and larger events, and every token once."""
    executor.script = Script(steps=[(token,) for token in range(40, 50)])
    app = make_app()
    sent: list[Message] = []
    gate = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 2:
            await until(lambda: not executor.running)

    body = [{"type": "http.request", "body": msgspec.json.encode({**BODY, "stream": True}), "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await gate.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    bodies = [message["body"] for message in sent[1:]]
    assert len(bodies) == 2
    assert [message["more_body"] for message in sent[1:]] == [True, False]
    assert bodies[1].count(b"data: ") == 2  # nine tokens in one event, and the end mark


async def test_api_keys_guard_v1_only(make_app: MakeApp) -> None:
    """Probes need no key; a missing, wrong or half key is a 401."""
    transport = httpx.ASGITransport(make_app(api_keys=ApiKeys(["first", "second"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        statuses = {
            value: (await client.get("/v1/models", headers={"authorization": value} if value else {})).status_code
            for value in ("", "Bearer", "Bearer fir", "Basic first", "Bearer first", "bearer second")
        }
        health = await client.get("/health")
        refused = await client.post("/v1/completions", json=BODY)
    assert statuses == {
        "": 401,
        "Bearer": 401,
        "Bearer fir": 401,
        "Basic first": 401,
        "Bearer first": 200,
        "bearer second": 200,
    }
    assert health.status_code == 200
    assert refused.json()["error"]["code"] == "invalid_api_key"


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    """It would lock everybody out; comments and blank lines are no keys."""
    file = tmp_path / "keys"
    file.write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys.load(str(file))
    file.write_text("# ours\nkey\n")
    assert ApiKeys.load(str(file)).allow(b"Bearer key")


async def test_health_and_readiness(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """A loading server is healthy but not ready; a dead one is neither."""
    seen = {}
    for state in HealthState:
        executor.health = Health(state, "why")
        seen[state] = ((await http.get("/health")).status_code, (await http.get("/ready")).status_code)
    assert seen == {HealthState.STARTING: (200, 503), HealthState.READY: (200, 200), HealthState.DEAD: (503, 503)}


@pytest.mark.parametrize(("stream", "gaps"), [(True, 2), (False, 1)])
async def test_metrics_count_requests_and_tokens(
    http: httpx.AsyncClient, executor: FakeExecutor, *, stream: bool, gaps: int
) -> None:
    """Counts, not times, are asserted: one first token, and the gaps after it; a whole answer's are looked at once."""
    executor.script = Script(steps=[(40,), (41,), (42,)], cached_tokens=1, pause_s=0.01)
    await http.post("/v1/completions", json={"prompt": [5, 6], "stream": stream})
    text = (await http.get("/metrics")).text
    assert await counted(http, 200) == 1
    for line in (
        "twostroke_prompt_tokens_total 2.0",
        "twostroke_cached_prompt_tokens_total 1.0",
        "twostroke_output_tokens_total 3.0",
        "twostroke_time_to_first_token_seconds_count 1.0",
        f"twostroke_inter_token_latency_seconds_count {gaps}.0",
        "twostroke_requests_in_flight 0.0",
    ):
        assert line in text.splitlines()
