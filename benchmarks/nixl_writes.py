"""NIXL's writes between two processes of one host: the peer of `kv_transfer`, run by a Python that has NIXL.

    target: register memory --metadata, address--> source: prepare all blocks of both sides, once
                                                   each run: make a transfer of chosen blocks, post, poll until done
                            <--end----------------

`measure_nixl`, called by the benchmark, starts both; the rest runs under the other Python, which needs `nixl-cu12` and
the standard library only. Its progress threads spin, so that nothing else should be measured meanwhile.
"""

import ctypes
import importlib
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.copy_lists import Pattern, block_lists

INSTALL = "pip install nixl-cu12==1.5.1 torch==2.13.0"
_DONE = "DONE"
_FAILED = "ERR"
_PATIENCE_S = 240.0
_REPOSITORY = Path(__file__).parents[1]


def measure_nixl(python: Path, transports: str, nbytes: int, size: int, rounds: int) -> dict[Pattern, list[float]]:
    """GB/s of each round, for both patterns.

    Args:
        python: Of the environment that has NIXL.
        transports: Value of `UCX_TLS`.
        nbytes: Memory of each side, all of which is copied each time.
        size: Bytes of a block.
        rounds: Samples of each pattern.

    Raises:
        RuntimeError: NIXL failed; with the end of what it said.
    """
    # Where the host's own libibverbs is installed, NIXL's dies at exit.
    environment = {**os.environ, "UCX_TLS": transports, "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}
    ends = socket.socketpair()
    processes = [
        subprocess.Popen(
            [python, "-m", "benchmarks.nixl_writes", role, str(end.fileno()), str(nbytes), str(size), str(rounds)],
            pass_fds=[end.fileno()],
            cwd=_REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role, end in zip(("target", "source"), ends, strict=True)
    ]
    for end in ends:
        end.close()
    try:
        output, _ = processes[1].communicate(timeout=_PATIENCE_S)
        return _parse(output)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"NIXL did not end in {_PATIENCE_S:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _parse(output: str) -> dict[Pattern, list[float]]:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return {Pattern(name): rates for name, rates in json.loads(line).items()}
    raise RuntimeError(f"NIXL gave no result: {output[-800:]}")


def _agent(name: str) -> Any:
    api = importlib.import_module("nixl_cu12._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def _block_descriptors(base: int, count: int, size: int) -> list[tuple[int, int, int]]:
    return [(base + number * size, size, 0) for number in range(count)]


def _target(connection: Connection, agent: Any, base: int) -> None:
    connection.send_bytes(agent.get_agent_metadata())
    connection.send_bytes(json.dumps(base).encode())
    connection.recv_bytes()


def _source(connection: Connection, agent: Any, base: int, *, count: int, size: int, rounds: int) -> None:
    target = agent.add_remote_agent(connection.recv_bytes())
    remote_base = json.loads(connection.recv_bytes())
    local = agent.prep_xfer_dlist("", _block_descriptors(base, count, size), "DRAM")
    remote = agent.prep_xfer_dlist(target, _block_descriptors(remote_base, count, size), "DRAM")
    draw = random.Random(0)

    def write(sources: Sequence[int], targets: Sequence[int]) -> float:
        start = time.perf_counter()
        transfer = agent.make_prepped_xfer("WRITE", local, sources, remote, targets)
        state = agent.transfer(transfer)
        while state not in (_DONE, _FAILED):
            state = agent.check_xfer_state(transfer)
        seconds = time.perf_counter() - start
        agent.release_xfer_handle(transfer)
        if state == _FAILED:
            raise RuntimeError("a transfer failed")
        return count * size / seconds / 1e9

    write([0], [0])  # connects
    rates = {pattern: [write(*block_lists(pattern, count, draw)) for _ in range(rounds)] for pattern in Pattern}
    print(json.dumps(rates), flush=True)
    connection.send_bytes(b"end")


def main() -> None:
    """Run one end: role, descriptor of the connection to the other, bytes of memory and of a block, rounds."""
    role, fd, nbytes, size, rounds = sys.argv[1:]
    connection = Connection(int(fd))
    memory = mmap.mmap(-1, int(nbytes))
    memory.write(b"\x5a" * int(nbytes))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent = _agent(role)
    agent.register_memory([(base, int(nbytes), 0, "")], "DRAM")
    if role == "target":
        _target(connection, agent, base)
    else:
        _source(connection, agent, base, count=int(nbytes) // int(size), size=int(size), rounds=int(rounds))
    sys.stdout.flush()
    os._exit(0)  # its destructors wait for the other side


if __name__ == "__main__":
    main()
