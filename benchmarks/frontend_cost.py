"""What does the frontend's process spend on a streamed chunk, and on a request that is not streamed?

Starts a real server over an executor that makes one token for every running request at a steady pace, as an engine
does, sends it requests over sockets, and reads the server's CPU time from the kernel:

    python -m benchmarks.frontend_cost [--streams 32] [--tokens 100] [--chat]

The executor's own share (making and feeding the outputs) is part of the numbers; `--profile FILE` keeps a profile of it
all for `python -m pstats`.
"""

import argparse
import asyncio
import cProfile
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from twostroke.executor.base import GenerationExecutor, Health, HealthState, ResultSink, ServedModel
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.chat_template import ChatTemplate
from twostroke.frontend.http_server import Site, bind, run_loop, serve
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.ids import ClientIds
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import pack_tokens

STEP_S = 0.02
NS = 1e9


class PacedExecutor(GenerationExecutor):
    """Makes one token for each running request every `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ids = ClientIds(1)
        self._running: dict[int, tuple[GenerationRequest, ResultSink, int]] = {}

    @property
    def model(self) -> ServedModel:
        """The tiny tokenizer's model."""
        return ServedModel("tiny", max_model_len=4096, vocab_size=320, eos_token_ids=(0,))

    def draw_client_id(self) -> int:
        """The next id."""
        return self._ids.draw()

    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """Run with the others from the next step on."""
        (sink,) = sinks
        self._running[request.key.client_id] = (request, sink, 0)

    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """Stop it."""
        del index
        self._running.pop(client_id, None)

    def check_health(self) -> Health:
        """Always ready."""
        return Health(HealthState.READY)

    def shutdown(self, deadline_s: float | None = None) -> None:
        """Nothing to end."""

    async def run(self) -> None:
        """Make tokens for ever."""
        letters = itertools.cycle(range(40, 90))
        while True:
            await asyncio.sleep(self._step_s)
            token = pack_tokens([next(letters)])
            batch = list(self._running.items())
            for client_id, (request, sink, made) in batch:
                last = made + 1 == request.sampling.max_tokens
                reason = FinishReason.LENGTH if last else None
                sink.feed(SequenceOutput(request.key, made, token, finish_reason=reason))
                if last:
                    del self._running[client_id]
                else:
                    self._running[client_id] = (request, sink, made + 1)
            for _, (_, sink, _) in batch:
                sink.wake()


async def serve_forever(step_s: float) -> None:
    """The server process: print the port, serve until killed."""
    executor = PacedExecutor(step_s)
    text = TextModel(tiny_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {}))
    app = create_app(executor, text, FrontendOptions(), CollectorRegistry())
    site = Site(app, bind("127.0.0.1", 0))
    making = asyncio.create_task(executor.run())
    await serve([site], stop=asyncio.Event(), on_started=lambda: print(site.url.rpartition(":")[2], flush=True))
    making.cancel()


def cpu_s(pid: int) -> float:
    """CPU time of the process's main thread, which is its event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / NS


def request_of(*, chat: bool, stream: bool, tokens: int) -> bytes:
    """One HTTP request on a connection that stays open."""
    content: dict[str, object] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = json.dumps({**content, "max_tokens": tokens, "stream": stream}).encode()
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body)


async def read_stream(port: int, request: bytes) -> int:
    """Send one request; how many events came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    events = -1  # the end mark is none
    tail = b""
    while not tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(1 << 16)
        events += data.count(b"data: ")
        tail = tail[-32:] + data
    writer.close()
    return events


async def ask_in_turn(port: int, request: bytes, count: int) -> None:
    """Send `count` requests over one connection, each after the answer to the one before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def measure(arguments: argparse.Namespace) -> None:
    """Start a server, put load on it, print what it spent."""
    command = [sys.executable, "-m", "benchmarks.frontend_cost", "--serve", *sys.argv[1:]]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        if server.stdout is None:
            raise RuntimeError("the server's output is not piped")
        port = int(await server.stdout.readline())
        await ask_in_turn(port, request_of(chat=arguments.chat, stream=False, tokens=1), 20)
        streamed = request_of(chat=arguments.chat, stream=True, tokens=arguments.tokens)
        before = cpu_s(server.pid)
        events = sum(await asyncio.gather(*(read_stream(port, streamed) for _ in range(arguments.streams))))
        spent = cpu_s(server.pid) - before
        print(f"streamed: {events} chunks, {spent / events * 1e6:.1f} us a chunk")
        whole = request_of(chat=arguments.chat, stream=False, tokens=arguments.whole_tokens)
        before = cpu_s(server.pid)
        await asyncio.gather(*(ask_in_turn(port, whole, arguments.requests) for _ in range(arguments.streams)))
        count = arguments.requests * arguments.streams
        print(f"whole: {count} requests, {(cpu_s(server.pid) - before) / count * 1e6:.1f} us a request")
    finally:
        server.send_signal(signal.SIGINT)
        await server.wait()


def main() -> None:
    """Read the command line; measure, or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=100, help="output length of the streamed requests")
    parser.add_argument("--requests", type=int, default=20, help="whole requests a connection")
    parser.add_argument("--whole-tokens", type=int, default=1, help="output length of the whole requests")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="time between the tokens of a request")
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--profile", help="write the server's profile here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.serve:
        asyncio.run(measure(arguments))
    elif arguments.profile:
        cProfile.runctx("run_loop(serve_forever(arguments.step_s))", globals(), locals(), arguments.profile)
    else:
        run_loop(serve_forever(arguments.step_s))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    main()
