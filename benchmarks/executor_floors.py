"""What stands beside the executor's forms, under the same loads: engines alone, and a bare queue.

    instant engine   stepped in a plain loop, without threads and results: no form can be cheaper
    real engine      likewise, over the instant runner: what its scheduler and block manager add to any form
    bare queue       messages as long as the ipc form's, passed between two processes that do nothing else (`zmq_echo`)

None of them registers requests, checks offsets or wakes readers; what a form costs beyond them is for that.
"""

from benchmarks.executor_forms import Load, Moment, Spent, request_of
from benchmarks.instant_engine import MODEL, instant_config, load_instant_runner
from benchmarks.processes import cpu_us
from benchmarks.zmq_echo import Echo
from twostroke.engine.engine import Engine
from twostroke.ipc.codec import request_codec, result_codec
from twostroke.protocol.ids import SequenceKey, draw_epoch
from twostroke.protocol.requests import RequestEnvelope
from twostroke.protocol.responses import ResponseBatch, SequenceOutput
from twostroke.protocol.tokens import pack_tokens
from twostroke.protocol.worker import Role
from twostroke.worker.loading import MakeEngine

_TYPICAL_OFFSET = 100


def alone(make_engine: MakeEngine, streams: int) -> Engine:
    """An engine over the instant runner, for up to `streams` sequences at the same time."""
    config = instant_config(streams)
    return make_engine(load_instant_runner(MODEL, config, print), config, Role.AGGREGATED)


def engine_alone(engine: Engine, load: Load) -> Spent:
    """Step `engine` until it has made `load`."""
    before = Moment.now()
    for turn in range(load.requests):
        for stream in range(load.streams):
            engine.add(request_of(turn * load.streams + stream, load.tokens))
        while engine.has_work:
            engine.step()
    return before.spent(0.0)


def bare_queue(echo: Echo, load: Load) -> Spent:
    """Pass the messages of `load`: one for each request, and one a step with the outputs of all streams."""
    request, answer = request_bytes(load.tokens), batch_bytes(load.streams)
    before, child_before = Moment.now(), cpu_us(echo.pid)
    for _ in range(load.requests):
        for _ in range(load.streams - 1):
            echo.send(request, 0, answer)
        echo.send(request, load.tokens, answer)
        for _ in range(load.tokens):
            echo.receive()
    return before.spent(cpu_us(echo.pid) - child_before)


def request_bytes(tokens: int) -> int:
    """Length of one encoded request."""
    return len(request_codec().encode(RequestEnvelope(draw_epoch(), request_of(1, tokens))))


def batch_bytes(streams: int) -> int:
    """Length of one encoded batch, with a token for each of `streams` sequences."""
    outputs = [SequenceOutput(SequenceKey(number), _TYPICAL_OFFSET, pack_tokens([1])) for number in range(streams)]
    return len(result_codec().encode(ResponseBatch(draw_epoch(), outputs)))
