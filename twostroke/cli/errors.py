"""How commands end when something is wrong that a person can put right: one line, and an exit status."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from twostroke.protocol.errors import ConfigError, ModelError, TwostrokeError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILURE = 1
EXIT_WRONG_CONFIG = 2
"""A setting or the model is wrong: starting again would not help."""


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors raised on purpose into one line on the error stream and an exit status."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TwostrokeError as error:
            words = " ".join(str(error).split())  # libraries whose errors are passed on may write paragraphs
            sys.stderr.write(f"twostroke: error: {words}\n")
            wrong_config = isinstance(error, ConfigError | ModelError)
            raise typer.Exit(EXIT_WRONG_CONFIG if wrong_config else EXIT_FAILURE) from error

    return run
