"""UCX's own bandwidth test, `ucx_perftest`, as it comes with UCX's wheel.

It writes one buffer over and over, so that its bytes stay in the caches.
"""

import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.processes import free_port

_WARM_UP = 100
_START_S = 15.0
_TRIES = 20
_RUN_S = 60.0
_BANDWIDTH_COLUMN = 5
"""Of the line of final numbers: iterations, three times in us, two bandwidths in MiB/s, last the whole run's."""
_GB_PER_MIB = (1 << 20) / 1e9


def find_perftest() -> Path | None:
    """The program in UCX's wheel; None where it is not."""
    spec = find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "bin" / "ucx_perftest"
        if program.exists():
            return program
    return None


def put_bandwidth(program: Path, transports: str, size: int, nbytes: int) -> float:
    """GB/s of `nbytes` in puts of `size` between two processes of this host.

    Raises:
        RuntimeError: The program failed.
    """
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(program.parents[1] / "lib"),
        "UCX_TLS": transports,
        "UCX_NET_DEVICES": "lo",
    }
    port = str(free_port())
    test = ["-t", "ucp_put_bw", "-s", str(size), "-n", str(nbytes // size), "-w", str(_WARM_UP), "-f", "-p", port]

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [str(program), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    server = start("-p", port)
    try:
        output = ""
        for _ in range(_TRIES):
            client = start("127.0.0.1", *test)
            output, errors = client.communicate(timeout=_RUN_S)
            if client.returncode == 0:
                return parse_bandwidth(output)
            output += errors
        raise RuntimeError(f"ucx_perftest failed: {output[-500:]}")
    finally:
        server.kill()
        server.communicate()


def parse_bandwidth(output: str) -> float:
    """GB/s from what `ucx_perftest -f` prints.

    Raises:
        RuntimeError: There is no line of numbers.
    """
    for line in reversed(output.splitlines()):
        fields = _numbers(line.split())
        if len(fields) > _BANDWIDTH_COLUMN:
            return fields[_BANDWIDTH_COLUMN] * _GB_PER_MIB
    raise RuntimeError(f"ucx_perftest printed no result: {output[-500:]}")


def _numbers(words: Sequence[str]) -> list[float]:
    try:
        return [float(word) for word in words]
    except ValueError:
        return []
