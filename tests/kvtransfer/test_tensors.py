"""Whole caches between two processes, on the CPU here, and from GPU to GPU (or within one) where there is one."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from kvtransfer.events import FetchEnded, TransferOutcome
from tests.support.tensor_transfer import BLOCKS, open_worker, pattern
from twostroke.protocol.transfer import TransferHandle

REPOSITORY = Path(__file__).parents[2]
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
)


@pytest.mark.parametrize("kind", ["cpu", GPU])
def test_what_the_step_wrote_arrives(kind: str) -> None:
    """Though it is offered while the step still runs; every byte, in reverse order of blocks."""
    ours = torch.device(kind, torch.cuda.device_count() - 1) if kind == "cuda" else torch.device(kind)
    theirs = "cuda:0" if kind == "cuda" else kind
    worker = open_worker(ours)
    command = [sys.executable, "-m", "tests.support.tensor_transfer", theirs]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = (line.split() for line in process.stdout or () if line.startswith(("handle", "lease")))
            handle = msgspec.msgpack.decode(bytes.fromhex(next(lines)[1]), type=TransferHandle)
            worker.agent.fetch(1, handle, range(BLOCKS), range(BLOCKS - 1, -1, -1), 60.0)
            assert worker.wait() == FetchEnded(1, TransferOutcome.DONE, True, BLOCKS)
            assert torch.equal(worker.blocks, pattern(ours).flip(0))
            assert next(lines) == ["lease", "done"]
        finally:
            process.kill()
            worker.agent.close(10.0)
