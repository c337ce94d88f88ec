"""Child of `transport_probe`: the writing side. UCX prints its tables to this process's standard output."""

import sys
import time

import msgspec

from kvtransfer.backend import BackendError, Connection, OperationState
from kvtransfer.transports import Transports
from kvtransfer.ucx import UcxBackend
from twostroke.cli.doctor.facts import TransportQuestion
from twostroke.cli.doctor.probe_buffer import PROBE_BYTES, make_buffer

_DEADLINE_S = 30.0


class SourceOrder(msgspec.Struct, frozen=True):
    """What to write where.

    Attributes:
        question: How.
        address: Of the target's inlet.
        key: Of its buffer.
        base: Where the block goes in the target.
    """

    question: TransportQuestion
    address: bytes
    key: bytes
    base: int


def write(order: SourceOrder) -> None:
    """Write one block and wait until it has landed.

    Raises:
        BackendError: It did not, or not in time.
    """
    question = order.question
    backend = UcxBackend(Transports(question.transports), question.net_devices)
    buffer = make_buffer(question.memory, last_gpu=False)
    backend.register(buffer)
    connection = backend.connect(order.address, order.key)
    connection.write(buffer.address, order.base, PROBE_BYTES)
    _flush(backend, connection)
    backend.close()


def _flush(backend: UcxBackend, connection: Connection) -> None:
    flush = connection.flush()
    deadline = time.monotonic() + _DEADLINE_S
    while flush.poll() is OperationState.PENDING:
        backend.progress()
        if time.monotonic() >= deadline:
            raise BackendError(f"a block of {PROBE_BYTES} bytes did not land in {_DEADLINE_S:g} s")
    if flush.poll() is OperationState.FAILED:
        raise BackendError(f"a block did not land: {flush.error}")


if __name__ == "__main__":
    try:
        write(msgspec.json.decode(sys.argv[1], type=SourceOrder))
    except BackendError as error:
        sys.exit(str(error))
