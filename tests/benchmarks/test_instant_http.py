"""The HTTP workers behind other routers answer as vLLM's do: whole or streamed, an event a token, at the asked pace."""

import time

import msgspec
import pytest

from benchmarks.http_load import ask_in_turn, completion, connect
from benchmarks.instant_http import Worker, ports, serve


async def _ask(worker: Worker, **fields: object) -> int:
    """How many events the answer has."""
    async with await serve(worker) as server:
        connections = await connect(next(ports(server)), 1)
        try:
            return await ask_in_turn(connections, completion(msgspec.json.encode(fields)), 1)
        finally:
            connections[0].close()


@pytest.mark.parametrize("step_ms", [0, 5])
async def test_a_stream_has_an_event_a_token_and_the_end_mark(step_ms: int) -> None:
    """And it is not faster than asked."""
    begun = time.monotonic()
    assert await _ask(Worker(prefill=False), prompt=[1], max_tokens=4, stream=True, seed=step_ms) == 5
    assert time.monotonic() - begun >= 4 * step_ms / 1000


async def test_a_whole_answer_has_no_events() -> None:
    """It is one JSON object."""
    assert await _ask(Worker(prefill=False), prompt=[1], max_tokens=4) == 0


async def test_prefill_makes_one_token_whatever_is_asked_for() -> None:
    """The rest is the decode worker's."""
    assert await _ask(Worker(prefill=True), prompt=[1], max_tokens=4, stream=True, seed=1000) == 2
