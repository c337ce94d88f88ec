"""Ports of this host: which can be listened on, and choosing some that stay free over a restart."""

import random
import socket
from collections.abc import Iterator

from twostroke.protocol.errors import ConfigError

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below the range from which Linux lends ports to outgoing connections: a part that restarts finds its own again."""

_WILDCARDS = {"*": "0.0.0.0", "": "0.0.0.0"}  # noqa: S104  (only to test whether a port is free)


def fault(host: str, port: int) -> str | None:
    """Why `port` at `host` cannot be listened on, in the system's words; None if it can.

    Connections of an earlier listener that linger do not count.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_WILDCARDS.get(host, host), port))
        except OSError as error:
            return error.strerror or str(error)
    return None


class PortPicker:
    """Hands out ports, each once.

    Args:
        seed: Where to begin in the range; None begins anywhere, so that two launches rarely meet.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._candidates = self._from(random.Random(seed).randrange(_LOWEST, _HIGHEST))  # noqa: S311  (no secret)
        self._taken: set[int] = set()

    def pick(self, host: str) -> int:
        """A free port at `host`.

        Raises:
            ConfigError: None is left, or `host` is no address of this machine.
        """
        for port in self._candidates:
            if port not in self._taken and fault(host, port) is None:
                self._taken.add(port)
                return port
        raise ConfigError(f"no free port between {_LOWEST} and {_HIGHEST} at {host}; is it an address of this host?")

    def claim(self, host: str, port: int, setting: str) -> int:
        """`port` itself if it is free, or any free one if it is 0.

        Raises:
            ConfigError: It is taken, or may not be listened on.
        """
        if port == 0:
            return self.pick(host)
        found = "this launch uses it already" if port in self._taken else fault(host, port)
        if found:
            raise ConfigError(f"{setting}: port {port} at {host} cannot be used: {found}; name another, or 0 for any")
        self._taken.add(port)
        return port

    @staticmethod
    def _from(first: int) -> Iterator[int]:
        yield from range(first, _HIGHEST)
        yield from range(_LOWEST, first)
