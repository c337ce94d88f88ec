"""CURVE on TCP sockets, with every key derived from the one cluster secret.

Both ends derive both key pairs by HKDF-SHA256 (RFC 5869), so nothing is exchanged or stored beside the secret:

    secret --HKDF("twostroke curve server")--> server key pair     on every bound TCP socket
    secret --HKDF("twostroke curve client")--> client key pair     on every connecting socket

A server admits the client key alone. libzmq asks a ZAP handler (RFC 27, `inproc://zeromq.zap.01` in the socket's
context) about each handshake: `CurveGuard` is that handler. Without one libzmq would admit any client that knows the
server's public key, so a guard is started before a secured socket binds.
"""

import hashlib
import hmac
import os
import threading
from dataclasses import dataclass
from typing import Self

import structlog
import zmq
from zmq.utils import z85

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"twostroke"
SECRET_BYTES = 32

_SERVER = "twostroke curve server"
_CLIENT = "twostroke curve client"
_ZAP_FRAMES = 7

log = structlog.get_logger(__name__)


def hkdf_sha256(secret: bytes, info: bytes, length: int, salt: bytes = b"") -> bytes:
    """Derive `length` bytes from `secret` for the use that `info` names; HKDF-SHA256, RFC 5869.

    Raises:
        ValueError: `length` is over 255 hash lengths.
    """
    if length > 255 * hashlib.sha256().digest_size:
        raise ValueError(f"HKDF-SHA256 gives at most {255 * 32} bytes, not {length}")
    pseudorandom_key = hmac.digest(salt or bytes(32), secret, "sha256")
    block, output, counter = b"", b"", 1
    while len(output) < length:
        block = hmac.digest(pseudorandom_key, block + info + bytes((counter,)), "sha256")
        output += block
        counter += 1
    return output[:length]


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair, both halves in z85 text (40 bytes). The secret half never shows in a repr."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"

    @classmethod
    def derive(cls, secret: bytes, purpose: str) -> Self:
        """The pair that `secret` gives for `purpose`.

        Raises:
            ValueError: The secret is not 32 bytes long.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a cluster secret is {SECRET_BYTES} bytes long, not {len(secret)}")
        private = z85.encode(hkdf_sha256(secret, purpose.encode(), 32))
        return cls(zmq.curve_public(private), private)


def secure_server(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Make `socket` speak CURVE as a server; call before it binds, with a `CurveGuard` on its context."""
    keys = CurveKeys.derive(secret, _SERVER)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def secure_client(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Make `socket` speak CURVE as a client of the same cluster; call before it connects."""
    keys = CurveKeys.derive(secret, _CLIENT)
    socket.setsockopt(zmq.CURVE_SERVERKEY, CurveKeys.derive(secret, _SERVER).public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


class CurveGuard:
    """The ZAP handler of one ZMQ context: admits the cluster's client key and nothing else.

    A context has room for one; it serves all secured sockets of that context from a thread of its own, until `close` or
    the end of the context (`term`; never `destroy`, which closes the guard's own socket under it).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: bytes) -> None:
        self._admitted = z85.decode(CurveKeys.derive(secret, _CLIENT).public)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.refused = 0
        self._thread = threading.Thread(target=self._serve, name="curve-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Call once, after the secured sockets were closed; best after their context has ended.

        A socket that still shakes hands when its guard goes away can keep the context from ending.
        """
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        try:
            while self._stop not in dict(poller.poll()):
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass  # the context ended first, and with it all sockets to guard
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """The ZAP reply: version, request id, status, text, user id, metadata."""
        version, request_id = (*frames, b"", b"")[:2]
        if len(frames) == _ZAP_FRAMES:
            mechanism, key = frames[5:]
            if mechanism == b"CURVE" and hmac.compare_digest(key, self._admitted):
                return [version, request_id, b"200", b"OK", b"cluster", b""]
        self.refused += 1
        if self.refused.bit_count() == 1:  # powers of two: a flood of connections is no flood of logs
            log.warning("refused connections without the cluster's key", refused=self.refused)
        return [version, request_id, b"400", b"not a key of this cluster", b"", b""]
