"""Other routers in the place of twostroke's, each from an environment of its own and with instant workers behind it.

`vllm-router` and `sglang-router` are Rust programs that pass requests and answers on between HTTP workers: they neither
tokenize nor detokenize, and count no tokens. Dynamo's frontend does both, as twostroke's router does; its workers are
its own mocker, on its own request and event planes.
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks.http_load import connect
from benchmarks.instant_worker import MODEL
from benchmarks.processes import START_S, await_line, free_port, running
from benchmarks.router_contenders import Contender

VLLM_ROUTER, SGLANG_ROUTER, DYNAMO = "vllm-router", "sglang-router", "dynamo frontend"
PACED_MODEL = "paced"
_POLL_S = 0.2
_DYNAMO_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
_DYNAMO_FAST, _DYNAMO_PACED = "1000000", "0.3"
"""Speed-up of the mocker's clock: at once, and about 20 ms a token."""

INSTALL: Mapping[str, str] = {
    VLLM_ROUTER: "pip install vllm-router==0.1.17",
    SGLANG_ROUTER: "pip install sglang-router==0.3.2",
    DYNAMO: "pip install ai-dynamo-runtime==1.6.1 aiohttp certifi 'kubernetes<33' msgspec prometheus-client pyzmq "
    "redis tqdm transformers zstandard uvloop && pip install --no-deps ai-dynamo==1.6.1",
}
"""What to install in the environment of each peer."""

_FOLDERS = {VLLM_ROUTER: "vllm-router", SGLANG_ROUTER: "sglang-router", DYNAMO: "dynamo"}


def python_of(peer: str, peers: Path) -> Path:
    """The interpreter of a peer's environment, a folder in `peers`."""
    return peers / _FOLDERS[peer] / "bin" / "python"


def missing(peer: str, peers: Path) -> str | None:
    """What to do before `peer` can be measured; None if nothing."""
    python = python_of(peer, peers)
    if python.exists():
        return None
    folder = python.parent.parent
    return f"no environment in {folder}: python -m venv {folder}, and with its pip: {INSTALL[peer]}"


@contextmanager
def vllm_router(peers: Path, folder: Path) -> Iterator[Contender]:
    """`vllm-router` with its prefill/decode split over the NIXL connector's protocol."""
    program = python_of(VLLM_ROUTER, peers).with_name("vllm-router")
    with _http_workers(folder) as (prefill, decode):
        port = free_port()
        command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
        command += ["--prefill", prefill, "--decode", decode, "--kv-connector", "nixl", "--policy", "round_robin"]
        command += ["--prometheus-port", str(free_port())]
        with running(command, folder / "vllm-router.log") as router:
            yield Contender(VLLM_ROUTER, port, router.pid)


@contextmanager
def sglang_router(peers: Path, folder: Path) -> Iterator[Contender]:
    """`sglang-router` with its prefill/decode split. Its completions take text only."""
    python = python_of(SGLANG_ROUTER, peers)
    with _http_workers(folder) as (prefill, decode):
        port = free_port()
        command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--pd-disaggregation", "--prefill", prefill, str(free_port()), "--decode", decode]
        command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
        with running(command, folder / "sglang-router.log") as router:
            yield Contender(SGLANG_ROUTER, port, router.pid, takes_token_ids=False)


@contextmanager
def dynamo(peers: Path, model: Path, folder: Path) -> Iterator[Contender]:
    """Dynamo's frontend, with a prefill and a decode mocker for each of two models: an instant and a paced one."""
    python = str(python_of(DYNAMO, peers))
    environment = {"DYN_FILE_KV": str(folder / "dynamo"), "HF_HUB_OFFLINE": "1"}
    planes = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    environment |= dict.fromkeys(planes, "127.0.0.1")

    def mocker(name: str, speed: str, role: str, *options: str) -> AbstractContextManager[object]:
        command = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", name, *_DYNAMO_PLANES]
        command += ["--endpoint", f"dyn://{name}.{'prefill' if role == 'prefill' else 'backend'}.generate"]
        command += ["--speedup-ratio", speed, "--disaggregation-mode", role, *options]
        return running(command, folder / f"dynamo-{name}-{role}.log", environment=environment)

    port = free_port()
    frontend = [python, "-m", "dynamo.frontend", "--http-port", str(port), *_DYNAMO_PLANES]
    with (
        mocker(MODEL, _DYNAMO_FAST, "prefill", "--bootstrap-ports", str(free_port())),
        mocker(MODEL, _DYNAMO_FAST, "decode"),
        mocker(PACED_MODEL, _DYNAMO_FAST, "prefill", "--bootstrap-ports", str(free_port())),
        mocker(PACED_MODEL, _DYNAMO_PACED, "decode"),
        running(frontend, folder / "dynamo.log", environment=environment) as process,
    ):
        yield Contender(DYNAMO, port, process.pid, paced_model=PACED_MODEL, keeps_pace=False)


async def until_served(contender: Contender) -> None:
    """Wait until a router answers requests for each of its models.

    Raises:
        TimeoutError: It did not in time.
    """
    async with asyncio.timeout(START_S):
        for step_ms in (0, 1):
            request = contender.request(8, 2, stream=False, step_ms=step_ms)
            while not await _answers(contender.port, request):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(_POLL_S)


@contextmanager
def _http_workers(folder: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a prefill and a decode worker. Each router has its own, free of the connections of others."""
    with ExitStack() as stack:
        urls = []
        for role in ("prefill", "decode"):
            log = folder / f"{role}-{free_port()}.log"
            worker = stack.enter_context(running([sys.executable, "-m", "benchmarks.instant_http", role], log))
            urls.append(f"http://127.0.0.1:{await_line(worker, log, 'port: ')}")
        yield urls[0], urls[1]


async def _answers(port: int, request: bytes) -> bool:
    try:
        (connection,) = await connect(port, 1)
        try:
            await connection.ask(request)
        finally:
            connection.close()
    except (OSError, RuntimeError):
        return False
    return True
