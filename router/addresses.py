"""Configured worker addresses, as ZMQ addresses to attach to; and how long to wait between tries.

`tcp://host:port` stands for one worker. `dns://name:port` stands for every address behind a headless service's name,
which changes as the role is scaled: it is asked for again and again.
"""

import asyncio
import random
import socket
from urllib.parse import urlsplit

from twostroke.protocol.errors import ConfigError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
MIN_JITTER = 0.5


def backoff_s(failures: int, draw: random.Random) -> float:
    """Seconds to wait after `failures` (at least 1) failed tries in a row: 0.1, 0.2, 0.4 ... 5, each times 0.5 to 1.

    The jitter keeps the routers of a cluster from trying all at once after a worker's restart.
    """
    # The exponent is bounded so that a worker that is away for days does not overflow it.
    longest = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16))
    return longest * draw.uniform(MIN_JITTER, 1.0)


def is_dns(address: str) -> bool:
    """Whether `address` names several workers through DNS."""
    return address.startswith("dns://")


def check_address(address: str, setting: str) -> None:
    """See that `address` can be attached to.

    Raises:
        ConfigError: It is neither `tcp://host:port` nor `dns://name:port`; names `setting`.
    """
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("tcp", "dns") and bool(parts.hostname) and bool(parts.port) and not parts.path
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{setting}: expected tcp://host:port or dns://name:port, not {address!r}")


async def resolve(address: str) -> list[str]:
    """The `tcp://` addresses behind `dns://name:port`, sorted.

    Raises:
        OSError: The name cannot be resolved now.
    """
    parts = urlsplit(address)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    return sorted({_tcp_address(info[0], str(info[4][0]), parts.port or 0) for info in found})


def _tcp_address(family: int, host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
