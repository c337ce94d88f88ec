"""The folder of one launch: its secret, a configuration file and a log for each part. It goes when the launch ends.

twostroke-up-XXXXXXXX/        0700
    secret                    0600, 64 hex digits, made anew for each launch
    router.yaml, context-0.yaml, ...
    logs/router.log, logs/context-0.log, ...
    lock                      held while the launch lives: folders of killed launches are told by it, and removed
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import yaml

from twostroke.cli.up.plan import PartPlan

_PREFIX = "twostroke-up-"
_SECRET_BYTES = 32


class LaunchDir:
    """Makes the folder; as a context manager, removes it.

    Args:
        log_dir: Where the logs are kept; None puts them into the folder, to go with it.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = _hold(self.path / "lock")
        self.secret_file = self.path / "secret"
        _write_private(self.secret_file, secrets.token_hex(_SECRET_BYTES) + "\n")
        self.temporary = self.path / "t"  # short: addresses of local sockets have 107 characters at most
        self.temporary.mkdir()
        self._logs = log_dir or self.path / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def write_config(self, part: PartPlan) -> Path:
        """Write the part's configuration, and name the file."""
        path = self.path / f"{part.name}.yaml"
        _write_private(path, yaml.safe_dump(msgspec.to_builtins(part.config), sort_keys=False))
        return path

    def log_file(self, part: str) -> Path:
        """Where the part's output goes."""
        return self._logs / f"{part}.log"

    def last_lines(self, part: str, count: int) -> list[str]:
        """The end of the part's log."""
        try:
            with self.log_file(part).open(errors="replace") as log:
                return [line.rstrip("\n") for line in deque(log, maxlen=count)]
        except FileNotFoundError:
            return []


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _hold(path: Path) -> IO[str]:
    lock = path.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _remove_abandoned() -> None:
    """Remove folders of launches that were killed: this user's, with a lock that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or not (folder / "lock").exists():
                continue
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # held by a live launch, or removed by another one at this moment
