"""Child of the doctor: has a block written from a process to another, and says which way it took.

    this process: the target                         its child, `transport_source`: the writer
    registers memory, opens an inlet  --argument-->  connects, writes, flushes
    progresses                        <==UCX======
    reads UCX's tables                <--stdout---   they are printed; status 0 once the block has landed

So a context worker writes into a generation worker, with the same code.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import structlog

from kvtransfer.backend import BackendError, BlockBuffer
from kvtransfer.transports import Transports
from kvtransfer.ucp import Ucp
from kvtransfer.ucx import UcxBackend
from kvtransfer.ucx_binding import load_ucp
from twostroke.cli.doctor.child import answer_stream
from twostroke.cli.doctor.facts import TransportFacts, TransportQuestion, UcxFacts
from twostroke.cli.doctor.probe_buffer import make_buffer
from twostroke.cli.doctor.protocol_table import find_protocol
from twostroke.cli.doctor.transport_source import SourceOrder

_SOURCE_DEADLINE_S = 90.0
_SOURCE_MODULE = "twostroke.cli.doctor.transport_source"


def ask_ucx(question: TransportQuestion) -> TransportFacts:
    """Have a block written from one process to another."""
    try:
        ucx = look_at_ucx()
    except BackendError as error:
        return TransportFacts(error=str(error))
    try:
        backend = UcxBackend(Transports(question.transports), question.net_devices)
        try:
            buffer = make_buffer(question.memory, last_gpu=True)
            backend.register(buffer)
            printed = _receive(backend, buffer, question)
        finally:
            backend.close()
    except BackendError as error:
        return TransportFacts(ucx, error=str(error))
    return TransportFacts(ucx, find_protocol(printed, question.memory))


def look_at_ucx() -> UcxFacts:
    """The UCX that transfers would use.

    Raises:
        BackendError: It does not load.
    """
    version = Ucp(load_ucp()).version()
    loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    library = next(Path(path) for path in sorted(loaded) if Path(path).name.startswith("libucp."))
    verbs = any((library.parent / "ucx").glob("libuct_ib*.so*"))
    return UcxFacts(version, str(library), verbs)


def _receive(backend: UcxBackend, buffer: BlockBuffer, question: TransportQuestion) -> str:
    """Progress until the source has ended; what it and UCX printed.

    Raises:
        BackendError: The block did not arrive.
    """
    inlet = backend.open_inlet()
    order = SourceOrder(question, inlet.address, inlet.key, buffer.address)
    environment = {name: value for name, value in os.environ.items() if name != "UCX_LOG_FILE"}
    with subprocess.Popen(  # noqa: S603  (this package's own module)
        [sys.executable, "-m", _SOURCE_MODULE, msgspec.json.encode(order).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"UCX_PROTO_INFO": "y"},
    ) as source:
        deadline = time.monotonic() + _SOURCE_DEADLINE_S
        while source.poll() is None:
            backend.progress()
            if time.monotonic() >= deadline:
                source.kill()
            time.sleep(0.001)
        printed = source.stdout.read() if source.stdout else ""
    if source.returncode:
        last = (printed.strip().splitlines() or ["nothing was printed"])[-1]
        raise BackendError(f"the writing process ended with status {source.returncode}: {last.strip()}")
    return printed


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with answer_stream() as stream:
        given = msgspec.json.decode(sys.argv[1], type=TransportQuestion)
        stream.write(msgspec.json.encode(ask_ucx(given)))
