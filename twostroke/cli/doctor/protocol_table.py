"""Reads the tables that UCX prints with `UCX_PROTO_INFO=y`: which protocol and transport it chose, by size.

    | ucp_context_0 intra-node cfg#0 | remote memory write by ucp_put* from host memory to host    |
    |                         0..inf | zero-copy                                          | tcp/lo |

Nothing in UCX's interface tells this; lanes of an endpoint (`ucp_ep_query`) do not say which of them a write takes.
"""

import re

from kvtransfer.backend import MemoryKind
from twostroke.cli.doctor.facts import Protocol

_HEADER = re.compile(r"\| remote memory write by ucp_put\*(?:\([^)]*\))? from (?P<source>\w+)\S*(?: memory)? to ")
_OTHER_HEADER = re.compile(r"\| [^|]* cfg#\d+ *\|")
_LARGEST = re.compile(r"\|\s*\d\w*\.\.inf\s*\|\s*(?P<how>[^|]+?)\s*\|\s*(?P<by>[^|]+?)\s*\|")


def find_protocol(printed: str, memory: MemoryKind) -> Protocol | None:
    """How large blocks in `memory` are written, by the last such table; None if there is none."""
    found: Protocol | None = None
    inside = False
    for line in printed.splitlines():
        header = _HEADER.search(line)
        if header:
            inside = header["source"] == memory.value
        elif _OTHER_HEADER.search(line):
            inside = False
        row = _LARGEST.search(line)
        if inside and row:
            found = Protocol(row["how"], row["by"])
    return found
