"""What each error is to an HTTP client: status, body, and when to come back.

400 bad input, with `param`      401 no valid API key     404 unknown model or path    405 wrong method
413 body too large               429 over a limit         499 the client left (counted, never sent to it)
500 a fault of ours              503 nobody can take it   504 out of time
"""

import enum
from dataclasses import dataclass

import msgspec

from twostroke.protocol.errors import (
    AbortedError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    TransferError,
    TwostrokeError,
)
from twostroke.protocol.openai_answers import ErrorBody, ErrorObject

RETRY_AFTER_S = 1
CLIENT_LEFT = 499


class Kind(enum.Enum):
    """Status and OpenAI's `type` of each kind of failure."""

    INVALID = (400, "invalid_request_error")
    UNAUTHENTICATED = (401, "authentication_error")
    NOT_FOUND = (404, "not_found_error")
    WRONG_METHOD = (405, "invalid_request_error")
    TOO_LARGE = (413, "invalid_request_error")
    OVER_LIMIT = (429, "rate_limit_error")
    ABORTED = (CLIENT_LEFT, "aborted_error")
    INTERNAL = (500, "server_error")
    UNAVAILABLE = (503, "service_unavailable_error")
    TIMEOUT = (504, "timeout_error")


class ApiError(TwostrokeError):
    """A failure that only the HTTP side knows.

    Args:
        kind: What kind.
        message: What is wrong and what to do.
        param: The request field at fault.
        code: For programs.
    """

    def __init__(self, kind: Kind, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.code = code


class ClientLeftError(TwostrokeError):
    """The client closed its connection; nobody reads an answer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as HTTP.

    Attributes:
        status: HTTP status.
        error: The body's content.
        retry: Whether the same request may succeed soon.
        unexpected: A bug of ours, to be logged with its traceback.
    """

    status: int
    error: ErrorObject
    retry: bool = False
    unexpected: bool = False

    @property
    def body(self) -> bytes:
        """`{"error": {...}}` in JSON."""
        return msgspec.json.encode(ErrorBody(self.error))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside the content type."""
        return [(b"retry-after", b"%d" % RETRY_AFTER_S)] if self.retry else []


_KINDS: tuple[tuple[type[TwostrokeError], Kind], ...] = (
    (InvalidRequestError, Kind.INVALID),
    (OverloadedError, Kind.UNAVAILABLE),
    (TransferError, Kind.UNAVAILABLE),
    (EngineDeadError, Kind.UNAVAILABLE),
    (DeadlineError, Kind.TIMEOUT),
    (AbortedError, Kind.ABORTED),
)


def problem_of(error: BaseException) -> Problem:
    """What `error` is to a client. The words of unexpected errors stay in the log: they may hold anything."""
    if isinstance(error, ApiError):
        return _problem(error.kind, str(error), error.param, error.code)
    for cls, kind in _KINDS:
        if isinstance(error, cls):
            return _problem(kind, str(error), getattr(error, "param", None), None)
    if isinstance(error, TwostrokeError):
        return _problem(Kind.INTERNAL, str(error), None, None)
    return Problem(
        500, ErrorObject("internal error; the server's log has the details", "server_error"), unexpected=True
    )


def _problem(kind: Kind, message: str, param: str | None, code: str | None) -> Problem:
    status, kind_name = kind.value
    return Problem(
        status, ErrorObject(message, kind_name, param, code), retry=kind in (Kind.OVER_LIMIT, Kind.UNAVAILABLE)
    )
