"""Configured addresses, DNS names, and the back-off between tries to attach."""

import asyncio
import random
import socket

import pytest

from router.addresses import backoff_s, check_address, is_dns, resolve
from twostroke.protocol.errors import ConfigError


def test_backoff_doubles_to_a_bound_with_jitter() -> None:
    """0.1 s, doubling, at most 5 s; the jitter takes up to half of it away."""
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    for failures, limit in enumerate(longest, start=1):
        draws = [backoff_s(failures, random.Random(seed)) for seed in range(20)]
        assert all(limit / 2 <= draw <= limit for draw in draws)
        assert len(set(draws)) == 20
    assert backoff_s(100_000, random.Random(0)) <= 5.0


@pytest.mark.parametrize("address", ["tcp://c0:7000", "tcp://127.0.0.1:1", "tcp://[::1]:7000", "dns://headless:7000"])
def test_good_addresses(address: str) -> None:
    """Hosts, addresses of both families, and names of headless services."""
    check_address(address, "workers.context")
    assert is_dns(address) == address.startswith("dns")


@pytest.mark.parametrize(
    "address", ["c0:7000", "tcp://c0", "tcp://:7000", "http://c0:1", "tcp://c0:99999", "tcp://a:1/x"]
)
def test_bad_addresses_are_refused_with_their_setting(address: str) -> None:
    """The message names the setting and the value."""
    with pytest.raises(ConfigError, match=r"workers\.context: expected tcp"):
        check_address(address, "workers.context")


async def test_resolve_gives_each_address_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address behind the name, sorted, IPv6 in brackets."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("headless", 7000)
        four = [(socket.AF_INET, 1, 6, "", (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
        return [*four, (socket.AF_INET6, 1, 6, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await resolve("dns://headless:7000") == [
        "tcp://10.0.0.1:7000",
        "tcp://10.0.0.2:7000",
        "tcp://[fd00::1]:7000",
    ]
