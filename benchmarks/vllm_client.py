"""Load from `vllm bench serve`, the client that comes with vLLM, and what it saw."""

import subprocess
from pathlib import Path

import msgspec

from benchmarks.vllm_peer import Served, vllm_program

RUN_S = 400.0


class Seen(msgspec.Struct, frozen=True):
    """The client's own figures; times in milliseconds."""

    completed: int
    failed: int
    mean_ttft_ms: float
    median_ttft_ms: float
    median_itl_ms: float
    p99_itl_ms: float
    output_throughput: float


class Ask(msgspec.Struct, frozen=True):
    """One run of the client.

    Attributes:
        concurrency: Requests at the same time.
        requests: How many in all.
        prompt: Tokens of a prompt; the words are drawn at random.
        output: Tokens of each answer.
        seed: Of the prompts: another one each time, or they would be found in the prefix caches.
    """

    concurrency: int
    requests: int
    prompt: int
    output: int
    seed: int


def bench_serve(peers: Path, served: Served, url: str, ask: Ask, folder: Path) -> Seen:
    """Run the client against `url`.

    Raises:
        RuntimeError: It failed, requests did, or it took longer than `RUN_S`.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [str(vllm_program(peers)), "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--endpoint", "/v1/completions", "--model", served.name, "--tokenizer", str(served.folder)]
    command += ["--dataset-name", "random", "--random-input-len", str(ask.prompt)]
    command += ["--random-output-len", str(ask.output), "--num-prompts", str(ask.requests), "--ignore-eos"]
    command += ["--max-concurrency", str(ask.concurrency), "--temperature", "0", "--seed", str(ask.seed)]
    command += ["--percentile-metrics", "ttft,itl", "--save-result", "--disable-tqdm"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{ask.requests} requests at {url} did not end within {RUN_S:g} s") from None
    if not result.exists():
        raise RuntimeError(f"vllm bench serve ended with {done.returncode}: {done.stderr[-2000:]}")
    seen = msgspec.json.decode(result.read_bytes(), type=Seen)
    if seen.failed or seen.completed != ask.requests:
        raise RuntimeError(f"{seen.failed} of {ask.requests} requests failed at {url}: {done.stdout[-2000:]}")
    return seen
