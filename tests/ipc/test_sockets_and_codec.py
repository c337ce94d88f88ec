"""Addresses given to peers, the size limit, and drop counters."""

import socket

import msgspec
import pytest

from twostroke.ipc.codec import MAX_MESSAGE_BYTES, request_codec, result_codec
from twostroke.ipc.drops import DropCounters, DropReason
from twostroke.ipc.sockets import advertised_address
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, RequestEnvelope
from twostroke.protocol.sampling import SamplingParams


@pytest.mark.parametrize(
    ("bound", "advertise", "address"),
    [
        ("tcp://127.0.0.1:7000", None, "tcp://127.0.0.1:7000"),
        ("tcp://127.0.0.1:7000", "c0.example", "tcp://c0.example:7000"),
        ("tcp://0.0.0.0:7000", "c0.example", "tcp://c0.example:7000"),
        ("tcp://[::1]:7000", None, "tcp://[::1]:7000"),
    ],
)
def test_the_advertised_host_wins_over_the_bound_one(bound: str, advertise: str | None, address: str) -> None:
    """The port is always the bound one."""
    assert advertised_address(bound, advertise) == address


def test_a_wildcard_is_advertised_as_the_host_names_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can connect to a wildcard."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "10.1.2.3")
    assert advertised_address("tcp://0.0.0.0:7000", None) == "tcp://10.1.2.3:7000"


def test_a_message_over_the_limit_is_refused_by_its_sender() -> None:
    """With its size, instead of a connection that the receiver closes."""
    request = GenerationRequest(key=SequenceKey(1), prompt_ids=bytes(MAX_MESSAGE_BYTES), sampling=SamplingParams())
    with pytest.raises(ProtocolError, match=f"over the limit of {MAX_MESSAGE_BYTES}"):
        request_codec().encode(RequestEnvelope(1, request))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1, {"type": "generate"}]),
        msgspec.msgpack.encode(["responses", 1, [["x"]]]),
    ],
    ids=["empty", "no msgpack", "deeply nested", "incomplete", "wrong types"],
)
def test_whatever_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    """For both queues; nothing else escapes from a decoder."""
    with pytest.raises(ProtocolError, match="not a message of this queue"):
        request_codec().decode(payload)
    with pytest.raises(ProtocolError, match="not a message of this queue"):
        result_codec().decode(payload)


def test_drops_are_counted_by_reason() -> None:
    """And in all."""
    drops = DropCounters()
    drops.count(DropReason.REPLAYED)
    drops.count(DropReason.UNKNOWN_KEY, 3)
    assert (drops[DropReason.REPLAYED], drops[DropReason.UNKNOWN_KEY], drops[DropReason.BAD_MAC]) == (1, 3, 0)
    assert drops.total == 4
