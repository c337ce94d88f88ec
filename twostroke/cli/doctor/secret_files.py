"""Reads the files that hold secrets as a server would, and their permissions. Their content goes nowhere."""

import stat
from collections.abc import Callable
from pathlib import Path

from twostroke.cli.doctor.facts import SecretFile
from twostroke.frontend.auth import ApiKeys
from twostroke.ipc.secret import load_secret
from twostroke.protocol.errors import ConfigError


def look_at_cluster_secret(path: str | None) -> SecretFile | None:
    """The cluster's secret; None where none is named."""
    return _look(path, load_secret)


def look_at_api_keys(path: str | None) -> SecretFile | None:
    """The clients' keys; None where none are named."""
    return _look(path, ApiKeys.load)


def _look(path: str | None, load: Callable[[str], object]) -> SecretFile | None:
    if path is None:
        return None
    try:
        load(path)
    except ConfigError as error:
        return SecretFile(path, error=str(error))
    return SecretFile(path, stat.S_IMODE(Path(path).stat().st_mode))
