"""Keys are derived from the secret, and only the cluster's client key gets through."""

from collections.abc import Iterator

import pytest
import zmq

from tests.support.processes import wait_until
from twostroke.ipc.curve import CurveGuard, CurveKeys, hkdf_sha256, secure_client, secure_server

SECRET, OTHER = bytes(range(32)), bytes(32)


class Wires:
    """Sockets of one guarded context, on loopback."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.guard = CurveGuard(self.context, SECRET)
        self._opened: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that is closed with the rest."""
        self._opened.append(self.context.socket(kind))
        return self._opened[-1]

    def close(self) -> None:
        """Sockets, then the context, then its guard."""
        for opened in self._opened:
            opened.close(0)
        self.context.term()
        self.guard.close()


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Closed at the end, however the test went."""
    made = Wires()
    yield made
    made.close()


def test_hkdf_agrees_with_rfc_5869() -> None:
    """Test case 1 of RFC 5869, appendix A.1."""
    output = hkdf_sha256(
        secret=b"\x0b" * 22,
        salt=bytes.fromhex("000102030405060708090a0b0c"),
        info=bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
        length=42,
    )
    assert output.hex() == ("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")


def test_hkdf_without_salt_agrees_with_rfc_5869() -> None:
    """Test case 3 of RFC 5869, appendix A.3."""
    assert hkdf_sha256(b"\x0b" * 22, b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_keys_depend_on_secret_and_purpose() -> None:
    """The same twice, others for anything else."""
    keys = CurveKeys.derive(SECRET, "server")
    assert keys == CurveKeys.derive(SECRET, "server")
    assert len({keys.public, CurveKeys.derive(SECRET, "client").public, CurveKeys.derive(OTHER, "server").public}) == 3


def test_a_private_key_never_shows() -> None:
    """Neither in `repr` nor, thus, in a log."""
    keys = CurveKeys.derive(SECRET, "server")
    assert keys.secret.decode() not in repr(keys)


def test_a_short_secret_is_refused() -> None:
    """With its length, not its value."""
    with pytest.raises(ValueError, match="32 bytes long, not 3"):
        CurveKeys.derive(b"abc", "server")


def bound_server(wires: Wires) -> tuple[zmq.Socket[bytes], str]:
    """A secured PULL socket and its address."""
    server = wires.open(zmq.PULL)
    secure_server(server, SECRET)
    server.bind("tcp://127.0.0.1:0")
    return server, server.getsockopt_string(zmq.LAST_ENDPOINT)


def test_the_clusters_client_gets_through(wires: Wires) -> None:
    """Same secret at both ends."""
    server, address = bound_server(wires)
    client = wires.open(zmq.PUSH)
    secure_client(client, SECRET)
    client.connect(address)
    client.send(b"hello")
    assert server.poll(5000)
    assert server.recv() == b"hello"
    assert wires.guard.refused == 0


def test_a_client_with_a_key_of_its_own_is_refused(wires: Wires) -> None:
    """It knows the server's public key, which is no secret, and is still not admitted."""
    server, address = bound_server(wires)
    client = wires.open(zmq.PUSH)
    secure_client(client, SECRET)
    stranger = CurveKeys.derive(OTHER, "stranger")
    client.setsockopt(zmq.CURVE_SECRETKEY, stranger.secret)
    client.setsockopt(zmq.CURVE_PUBLICKEY, stranger.public)
    client.connect(address)
    client.send(b"hello")
    wait_until(lambda: wires.guard.refused > 0, 5.0, "the refusal")
    assert not server.poll(300)


@pytest.mark.parametrize("secret", [OTHER, None], ids=["other secret", "no secret"])
def test_a_client_with_another_secret_or_none_is_refused(wires: Wires, secret: bytes | None) -> None:
    """The handshake fails before the guard is even asked."""
    server, address = bound_server(wires)
    client = wires.open(zmq.PUSH)
    if secret is not None:
        secure_client(client, secret)
    client.connect(address)
    client.send(b"hello")
    assert not server.poll(300)
