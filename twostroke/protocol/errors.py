"""The errors that users and callers meet.

    TwostrokeError
    |-- ConfigError            a setting is wrong; carries its path (`generation.kv_cache.block_size`)
    |-- ModelError             the model folder cannot be served; says why
    |-- RequestError           ends one request only
    |   |-- InvalidRequestError    the caller's fault (HTTP 400), with the offending `param`
    |   |-- OverloadedError        no room now, try again (HTTP 503 with Retry-After)
    |   |-- DeadlineError          the request's time is up (HTTP 504)
    |   |-- AbortedError           the caller or its client gave the request up (HTTP 499)
    |   |-- TransferError          the KV cache could not be moved (HTTP 503)
    |   `-- InternalRequestError   a bug or broken promise that harmed only this request (HTTP 500)
    |-- EngineDeadError        fatal to one executor: the worker died or its connection is lost (HTTP 503)
    `-- ProtocolError          a peer sent something that the protocol does not allow

A `RequestError` crosses the wire as `ErrorInfo`; `to_info` and `from_info` translate.
"""

import enum

import msgspec


class TwostrokeError(Exception):
    """Root of all errors raised on purpose by twostroke."""


class ConfigError(TwostrokeError):
    """A setting is missing, unknown or out of range; the message starts with its dotted path."""


class ModelError(TwostrokeError):
    """The model folder cannot be served; the message says what was found and what would be accepted."""


class ProtocolError(TwostrokeError):
    """A peer sent a message that the protocol does not allow here; the message is dropped and counted."""


class EngineDeadError(TwostrokeError):
    """The executor's worker is gone; every pending result of this executor fails with this error."""


class ErrorKind(enum.StrEnum):
    """The wire name of each `RequestError`."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    TRANSFER = "transfer"
    INTERNAL = "internal"


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestError` on the wire.

    Attributes:
        kind: Which class to raise at the other end.
        message: What is wrong, with the value, and what to do.
        param: The request field at fault, for `INVALID`.
    """

    kind: ErrorKind
    message: str
    param: str | None = None


class RequestError(TwostrokeError):
    """Ends one request and nothing else."""

    kind = ErrorKind.INTERNAL

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def to_info(self) -> ErrorInfo:
        """This error in its wire form."""
        return ErrorInfo(self.kind, str(self), self.param)


class InvalidRequestError(RequestError):
    """The request itself is wrong; `param` names the field."""

    kind = ErrorKind.INVALID


class OverloadedError(RequestError):
    """No worker can take the request now."""

    kind = ErrorKind.OVERLOADED


class DeadlineError(RequestError):
    """The request did not finish in its time."""

    kind = ErrorKind.DEADLINE


class AbortedError(RequestError):
    """The request was given up by its caller."""

    kind = ErrorKind.ABORTED


class TransferError(RequestError):
    """The KV cache of the request could not be moved to its generation worker."""

    kind = ErrorKind.TRANSFER


class InternalRequestError(RequestError):
    """Something broke that should not have, but it harmed this request only."""

    kind = ErrorKind.INTERNAL


def from_info(info: ErrorInfo) -> RequestError:
    """The exception that `info` describes."""
    for cls in (InvalidRequestError, OverloadedError, DeadlineError, AbortedError, TransferError):
        if cls.kind is info.kind:
            return cls(info.message, info.param)
    return InternalRequestError(info.message, info.param)
