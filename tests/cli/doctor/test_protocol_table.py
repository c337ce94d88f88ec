"""What UCX prints about its choices, as it prints it: line numbers in brackets, several tables, several sizes."""

import pytest

from kvtransfer.backend import MemoryKind
from twostroke.cli.doctor.facts import Protocol
from twostroke.cli.doctor.protocol_table import find_protocol


def _printed(*lines: str) -> str:
    return "\n".join(f"[1796028272.897860] [vm:7979 :0]   {line}" for line in lines)


HOST_TABLE = (
    "+--------------------------------+-------------------------------------------------------------+",
    "| ucp_context_0 intra-node cfg#0 | remote memory write by ucp_put* from host memory to host    |",
    "+--------------------------------+----------------------------------------------------+--------+",
    "|                        0..2048 | short                                              | tcp/lo |",
    "|                      2049..inf | zero-copy                                          | tcp/lo |",
    "+--------------------------------+----------------------------------------------------+--------+",
)
CUDA_TABLE = (
    "| ucp_context_0 intra-node cfg#2 | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1] |",
    "|                         0..inf | zero-copy                                    | cuda_ipc/cuda         |",
)
STAGED_TABLE = (
    "| ucp_context_0 inter-node cfg#1 | remote memory write by ucp_put* from cuda/GPU0 to cuda |",
    "|                         0..inf | software emulation                          | tcp/eth0 |",
)
OTHER_TABLE = (
    "| ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from host memory |",
    "|                         0..inf | (?) rendezvous zero-copy read      | cma/memory   |",
)


@pytest.mark.parametrize(
    ("lines", "memory", "expected"),
    [
        (HOST_TABLE, MemoryKind.HOST, Protocol("zero-copy", "tcp/lo")),
        ((*HOST_TABLE, *OTHER_TABLE), MemoryKind.HOST, Protocol("zero-copy", "tcp/lo")),
        ((*HOST_TABLE, *CUDA_TABLE), MemoryKind.HOST, Protocol("zero-copy", "tcp/lo")),
        ((*HOST_TABLE, *CUDA_TABLE), MemoryKind.CUDA, Protocol("zero-copy", "cuda_ipc/cuda")),
        ((*CUDA_TABLE, *HOST_TABLE), MemoryKind.CUDA, Protocol("zero-copy", "cuda_ipc/cuda")),
        (STAGED_TABLE, MemoryKind.CUDA, Protocol("software emulation", "tcp/eth0")),
        (STAGED_TABLE, MemoryKind.HOST, None),
        (OTHER_TABLE, MemoryKind.HOST, None),
        (("UCX says nothing",), MemoryKind.HOST, None),
    ],
)
def test_the_row_for_large_blocks_of_that_memory(
    lines: tuple[str, ...], memory: MemoryKind, expected: Protocol | None
) -> None:
    """Rows for small blocks, tables of other operations and of other memory are passed over."""
    assert find_protocol(_printed(*lines), memory) == expected
