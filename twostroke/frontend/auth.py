"""API keys: one a line in a file; clients send one as `Authorization: Bearer KEY`."""

import hashlib
import hmac
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from twostroke.frontend.errors import ApiError, Kind
from twostroke.frontend.exchange import Exchange
from twostroke.protocol.errors import ConfigError

AsyncApp = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
"""An ASGI application whose call gives a coroutine."""

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Probes and metrics need no key: they are for the cluster and say nothing of requests."""


class ApiKeys:
    """The keys that clients may use; only their digests are kept.

    Args:
        keys: The keys.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Read a file of one key a line; blank lines and lines that start with `#` are skipped.

        Raises:
            ConfigError: The file cannot be read, or holds no key (which would lock everybody out).
        """
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"security.api_keys_file: {path} cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(
                f"security.api_keys_file: {path} holds no key; write one a line, or leave the setting out"
            )
        return cls(keys)

    def allow(self, authorization: bytes | None) -> bool:
        """Whether the header's value carries one of the keys.

        Every key is compared, each in constant time, so that the time taken tells nothing of any key.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class RequireApiKey:
    """ASGI middleware: `/v1/...` and the tokenizer need a key.

    Args:
        app: The application behind.
        keys: Who may enter.
    """

    def __init__(self, app: AsyncApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Pass the request on, or answer 401; what is awaited is the application's own coroutine."""
        if scope["type"] == "http" and scope["path"].startswith(GUARDED):
            authorization = None
            for name, value in scope["headers"]:
                if name == b"authorization":
                    authorization = value
                    break
            if not self._keys.allow(authorization):
                return _refuse(scope, receive, send)
        return self._app(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    message = "a valid API key is needed: send it as `Authorization: Bearer KEY`"
    await Exchange(scope, receive, send).fail(ApiError(Kind.UNAUTHENTICATED, message, code="invalid_api_key"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
