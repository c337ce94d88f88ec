"""A transfer agent in a process of its own, steered by lines on stdin.

context BLOCKS SIZE      offer CLIENT_ID BLOCK,...    -> handle HEX, later: lease CLIENT_ID OUTCOME
generation BLOCKS SIZE   fetch ID HEX N               -> later: fetch ID OUTCOME SAFE COUNT, perhaps: safe ID
                         (asks for positions 0..N-1, into the last blocks backwards)
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Self

import msgspec
import structlog

from kvtransfer.events import BlocksSafe, FetchEnded, LeaseEnded
from kvtransfer.options import SharedMemory, TransferTimeouts
from tests.support.transfer import Worker, context_memory, generation_memory
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.transfer import TransferHandle

QUICK = TransferTimeouts(ping_s=0.1, silence_s=0.6, park_s=0.3, stop_s=0.3, serve_s=20.0)
REPOSITORY = Path(__file__).parents[2]


class TransferProcess:
    """The parent's end; a context manager that leaves no process behind."""

    def __init__(self, role: str, blocks: int, size: int, shared_memory: SharedMemory = SharedMemory.OFF) -> None:
        arguments = [role, str(blocks), str(size), shared_memory.value]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer_process", *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.expect("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            if " UCX " not in line:  # UCX logs to stdout
                self._lines.put(line.strip())

    def send(self, line: str) -> None:
        """Give an order."""
        if self.process.stdin is None:
            raise RuntimeError("the process has no stdin")
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, start: str, timeout_s: float = 20.0) -> str:
        """The rest of the next line, which must begin with `start`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            raise AssertionError(f"no {start!r} in {timeout_s} s; exit status {self.process.poll()}") from None
        assert line.startswith(start), line
        return line.removeprefix(start).strip()

    def offer(self, client_id: int, blocks: list[int]) -> TransferHandle:
        """A lease of the context worker."""
        self.send(f"offer {client_id} {','.join(map(str, blocks))}")
        return msgspec.msgpack.decode(bytes.fromhex(self.expect("handle")), type=TransferHandle)

    def fetch(self, transfer_id: int, handle: TransferHandle, count: int) -> None:
        """A fetch of the generation worker."""
        self.send(f"fetch {transfer_id} {msgspec.msgpack.encode(handle).hex()} {count}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid, number)


def _obey(worker: Worker, words: list[str]) -> None:
    if words[0] == "offer":
        key = SequenceKey(int(words[1]))
        handle = worker.agent.offer(key, [int(block) for block in words[2].split(",")], 30.0)
        print("handle", msgspec.msgpack.encode(handle).hex(), flush=True)
    elif words[0] == "fetch":
        handle = msgspec.msgpack.decode(bytes.fromhex(words[2]), type=TransferHandle)
        count, last = int(words[3]), len(worker.memory) - 1
        blocks = [last - number for number in range(count)]
        worker.agent.fetch(int(words[1]), handle, range(count), blocks, 20.0)


def _tell(worker: Worker) -> None:
    for event in worker.agent.poll():
        match event:
            case LeaseEnded(key, outcome):
                print("lease", key.client_id, outcome.value, flush=True)
            case FetchEnded(transfer_id, outcome, safe, count):
                print("fetch", transfer_id, outcome.value, safe, count, flush=True)
            case BlocksSafe(transfer_id):
                print("safe", transfer_id, flush=True)


def main() -> None:
    """Run until killed or until stdin ends."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    role, blocks, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = context_memory(blocks, size) if role == "context" else generation_memory(blocks, size)
    worker = Worker(memory, timeouts=QUICK, shared_memory=SharedMemory(sys.argv[4]))
    orders: Queue[str] = Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        orders.put("")

    threading.Thread(target=read, daemon=True).start()
    print("ready", flush=True)
    while True:
        _tell(worker)
        try:
            order = orders.get_nowait()
        except Empty:
            time.sleep(0.002)
            continue
        if not order:
            break
        _obey(worker, order.split())
    worker.close()


if __name__ == "__main__":
    main()
