"""How every process of twostroke logs: structured lines on stderr, without the values of local variables.

structlog's default renders exceptions with all locals when a terminal library is installed; those may hold secrets.
"""

import os
import sys

import structlog

LOG_FORMAT_VARIABLE = "TWOSTROKE_LOG_FORMAT"
"""`json` for log collectors; anything else, or nothing, for people."""


def configure_logs(part: str) -> None:
    """Configure this process's logs once, at its start.

    Args:
        part: Name of the process in every line (`worker`, `router`, ...).
    """
    shared: list[structlog.typing.Processor] = [
        _name(part),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if os.environ.get(LOG_FORMAT_VARIABLE) == "json":
        renderers: list[structlog.typing.Processor] = [
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
    else:
        renderers = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    structlog.configure(
        processors=[*shared, *renderers],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _name(part: str) -> structlog.typing.Processor:
    """Puts the process's name into every line, whichever thread writes it."""

    def add(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["part"] = part
        return event

    return add
