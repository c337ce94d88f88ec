"""`twostroke bench` as a person runs it, against a small server of the test's own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from twostroke.cli.main import app

PIECE = b'data: {"choices":[{"text":"a"}]}\n\n'


@dataclass
class Endpoint:
    """A server that streams `max_tokens` pieces; `answers` overrides the next ones by path or behaviour.

    Attributes:
        bodies: What was asked.
        hang_after: Streams hang after so many pieces; None for never.
        refuse: Status of every answer but 200.
        cut: Close the connection in the middle of every stream.
    """

    url: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    hang_after: int | None = None
    refuse: int = 200
    cut: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                self.keys.add(fields.get("authorization", ""))
                body = await reader.readexactly(int(fields["content-length"]))
                if head.startswith("GET /v1/models "):
                    answer = b'{"data":[{"id":"m"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
                    continue
                asked = json.loads(body)
                self.bodies.append(asked)
                if self.refuse != 200:
                    writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % self.refuse)
                    continue
                await self._stream(writer, asked["max_tokens"])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(count):
            if number == self.hang_after:
                await asyncio.sleep(60)
            writer.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
            await writer.drain()
            await asyncio.sleep(0.002)
            if self.cut:
                raise ConnectionResetError
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % count
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(usage), usage))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A server on a thread of its own."""
    served = Endpoint()
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        server.close()

    def serve() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    task = loop.create_task(run())
    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(5)
    yield served
    loop.call_soon_threadsafe(task.cancel)
    thread.join(5)


def run_bench(endpoint: Endpoint, *arguments: str) -> Result:
    """Run it in this process; `asyncio` takes SIGINT only on the main thread, which tests run on."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["bench", "--url", endpoint.url, *arguments])


def test_a_closed_loop_sends_what_was_asked_and_reports_it(endpoint: Endpoint, tmp_path: Path) -> None:
    """Prompts of ids, lengths, warm-up apart, the model from /v1/models, figures in the file."""
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    options = ["--concurrency", "3", "--requests", "7", "--prompt-tokens", "4", "--output-tokens", "5"]
    done = run_bench(endpoint, *options, "--slo", "ttft=9e6", "--json", str(file), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert len(endpoint.bodies) == 8
    asked = endpoint.bodies[-1]
    assert (asked["model"], asked["max_tokens"], asked["stream"], asked["ignore_eos"]) == ("m", 5, True, True)
    assert all(len(body["prompt"]) == 4 for body in endpoint.bodies if isinstance(body["prompt"], list))
    found = json.loads(file.read_bytes())
    summary = found["summary"]
    assert (summary["done"], summary["failed"], summary["output_tokens"], summary["prompt_tokens"]) == (7, 0, 35, 28)
    assert (summary["ttft_ms"]["count"], summary["itl_ms"]["count"], summary["good_requests"]) == (7, 28, 7)
    assert len(found["requests"]) == 7
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "7 done, 0 failed, 0 unfinished" in done.output


def test_an_open_loop_and_chat(endpoint: Endpoint, tmp_path: Path) -> None:
    """Poisson arrivals; text in a message; the key travels; the extension field can be left out."""
    key = tmp_path / "key"
    key.write_text("k-1\n")
    options = ["--rate", "200", "--requests", "5", "--output-tokens", "1", "--chat", "--no-ignore-eos"]
    done = run_bench(endpoint, *options, "--warm-up", "0", "--model", "x", "--api-key-file", str(key))
    assert done.exit_code == 0, done.output
    assert len(endpoint.bodies) == 5
    assert all(body["model"] == "x" and "messages" in body and "ignore_eos" not in body for body in endpoint.bodies)
    assert endpoint.keys == {"bearer k-1"}


def test_a_trace_is_replayed(endpoint: Endpoint, tmp_path: Path) -> None:
    """With its own arrivals, prompts and lengths."""
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"at_s": 0.02, "prompt": "b", "output_tokens": 2}\n{"at_s": 0, "prompt": "a", "output_tokens": 1}\n'
    )
    done = run_bench(endpoint, "--trace", str(file), "--warm-up", "0")
    assert done.exit_code == 0, done.output
    assert [(body["prompt"], body["max_tokens"]) for body in endpoint.bodies] == [("a", 1), ("b", 2)]


def test_errors_are_counted_by_kind(endpoint: Endpoint) -> None:
    """A run in which nothing finished fails."""
    endpoint.refuse = 429
    done = run_bench(endpoint, "--concurrency", "2", "--requests", "3")
    assert done.exit_code == 1
    assert "3 x http 429" in done.output
    endpoint.refuse, endpoint.cut = 200, True
    done = run_bench(endpoint, "--concurrency", "2", "--requests", "3")
    assert "3 x connection lost" in done.output


def test_ctrl_c_prints_what_was_measured(endpoint: Endpoint, tmp_path: Path) -> None:
    """Including the tokens of requests that still ran; the file is written too."""
    endpoint.hang_after = 3
    file = tmp_path / "r.json"
    options = ["--concurrency", "2", "--output-tokens", "5", "--warm-up", "0", "--json", str(file)]
    command = [sys.executable, "-m", "twostroke.cli", "bench", "--url", endpoint.url, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(500):
            if len(endpoint.bodies) == 2:
                break
            threading.Event().wait(0.02)
        threading.Event().wait(0.5)  # the three pieces of both are on their way
        os.kill(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=10)
    assert "0 done, 0 failed, 2 unfinished" in out, error
    assert "stopped by Ctrl-C" in error
    found = json.loads(file.read_bytes())
    assert found["interrupted"] is True
    assert [one["output_tokens"] for one in found["requests"]] == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--concurrency or --rate"),
        (["--rate", "1", "--concurrency", "1"], "--rate"),
        (["--concurrency", "1", "--prompt-tokens", "9:3"], "--prompt-tokens"),
        (["--concurrency", "1", "--duration", "0"], "--duration"),
        (["--concurrency", "1", "--slo", "x=1"], "--slo"),
        (["--concurrency", "1", "--api-key-file", "/nowhere/key"], "--api-key-file"),
        (["--rate", "1", "--trace", "/nowhere/trace"], "--trace"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_status_2(endpoint: Endpoint, options: list[str], message: str) -> None:
    """Before anything is sent."""
    done = run_bench(endpoint, *options)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"twostroke: error: {message}")
    assert endpoint.bodies == []


def test_an_endpoint_that_is_not_there_is_one_line() -> None:
    """Exit status 1: it may come."""
    done = run_bench(Endpoint("http://127.0.0.1:9"), "--concurrency", "1")
    assert done.exit_code == 1
    assert "127.0.0.1:9 cannot be reached" in done.stderr


def test_a_picture_without_its_library_is_refused_before_the_run(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_bench(endpoint, "--concurrency", "1", "--plot", "x.png")
    assert done.exit_code == 2
    assert "pip install 'twostroke[bench]'" in done.stderr
    assert endpoint.bodies == []
