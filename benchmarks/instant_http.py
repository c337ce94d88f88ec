"""HTTP workers without an engine, for routers that speak HTTP to their workers: OpenAI completions, at once or paced.

    python -m benchmarks.instant_http prefill|decode    prints `port: PORT`

A prefill worker answers every request with one token and, as vLLM's does, with parameters for the hand-over; a decode
worker makes `max_tokens`. As with `instant_worker`, a request's seed is its pace in milliseconds a token, one at least;
an answer that is not streamed comes at once. Each token of a stream is written by itself.
"""

import argparse
import asyncio
import socket
from collections.abc import Iterator

import httptools
import msgspec
import uvloop

from benchmarks.instant_worker import LEAST_STEP_MS, MODEL

WORD = " word"
_ANSWERS = {
    b"/health": b"{}",
    b"/v1/models": msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"/get_model_info": msgspec.json.encode({"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}),
    b"/server_info": msgspec.json.encode({"model_path": MODEL, "served_model_name": MODEL, "version": "0.5.0"}),
}
_HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": list(range(8)),
    "remote_engine_id": "0" * 36,
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


class _Fields(msgspec.Struct):
    """What a worker looks at in a request."""

    max_tokens: int | None = None
    stream: bool | None = None
    seed: int | None = None


def whole(tokens: int, *, handover: bool) -> bytes:
    """The JSON body of an answer of `tokens` tokens."""
    answer: dict[str, object] = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": MODEL}
    answer["choices"] = [{"index": 0, "text": WORD * tokens, "logprobs": None, "finish_reason": "length"}]
    answer["usage"] = {"prompt_tokens": 128, "completion_tokens": tokens, "total_tokens": 128 + tokens}
    if handover:
        answer["kv_transfer_params"] = _HANDOVER
    return msgspec.json.encode(answer)


def event(*, last: bool) -> bytes:
    """One token of a stream, as a chunk of HTTP; with the last one come the end mark and the end of the answer."""
    choice = {"index": 0, "text": WORD, "logprobs": None, "finish_reason": "length" if last else None}
    answer = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    data = b"data: %s\n\n" % msgspec.json.encode(answer)
    if not last:
        return b"%x\r\n%s\r\n" % (len(data), data)
    data += b"data: [DONE]\n\n"
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


EVENT, LAST_EVENT = event(last=False), event(last=True)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Steps:
    """Makes a token of every stream of one pace at a time."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: list[tuple[asyncio.Transport, int]] = []
        self._due = 0.0

    def add(self, transport: asyncio.Transport, tokens: int) -> None:
        """Stream `tokens` tokens over a connection, from the next step on."""
        if not self._streams:
            self._due = asyncio.get_running_loop().time()
            self._schedule()
        self._streams.append((transport, tokens))

    def _schedule(self) -> None:
        # As in `instant_worker`: late steps are made up for, but for the fastest.
        fastest = self._step_s * 1000 <= LEAST_STEP_MS
        self._due = (asyncio.get_running_loop().time() if fastest else self._due) + self._step_s
        asyncio.get_running_loop().call_at(self._due, self._step)

    def _step(self) -> None:
        going_on = []
        for transport, left in self._streams:
            if not transport.is_closing():
                transport.write(EVENT if left > 1 else LAST_EVENT)
                if left > 1:
                    going_on.append((transport, left - 1))
        self._streams = going_on
        if going_on:
            self._schedule()


class Worker:
    """What the connections of one worker share.

    Args:
        prefill: It makes one token a request.
    """

    def __init__(self, *, prefill: bool) -> None:
        self.prefill = prefill
        self._steps: dict[int, Steps] = {}

    def answer(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        """Answer one request."""
        if path not in {b"/v1/completions", b"/generate"}:
            transport.write(_whole_answer(_ANSWERS.get(path, b"{}")))
            return
        fields = msgspec.json.decode(body, type=_Fields)
        tokens = 1 if self.prefill else fields.max_tokens or 1
        if not fields.stream:
            transport.write(_whole_answer(whole(tokens, handover=self.prefill)))
            return
        transport.write(_STREAM)
        step_ms = max(fields.seed or 0, LEAST_STEP_MS)
        self._steps.setdefault(step_ms, Steps(step_ms / 1000)).add(transport, tokens)


class _Connection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # it is one, for TCP
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._worker.answer(self._transport, self._path, b"".join(self._body))


def _whole_answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


async def serve(worker: Worker) -> asyncio.Server:
    """Listen on a free port of this host."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Connection(worker), "127.0.0.1", 0, backlog=1024)


def ports(server: asyncio.Server) -> Iterator[int]:
    """Where `server` listens."""
    return (listener.getsockname()[1] for listener in server.sockets)


async def _run(role: str) -> None:
    server = await serve(Worker(prefill=role == "prefill"))
    print(f"port: {next(ports(server))}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("prefill", "decode"))
    uvloop.run(_run(parser.parse_args().role))


if __name__ == "__main__":
    main()
