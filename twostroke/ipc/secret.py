"""The cluster secret: 32 random bytes, kept in a file as 64 hex digits."""

import secrets
import stat
from pathlib import Path

import structlog

from twostroke.ipc.curve import SECRET_BYTES
from twostroke.protocol.errors import ConfigError

log = structlog.get_logger(__name__)


def new_secret() -> bytes:
    """A fresh secret for one cluster."""
    return secrets.token_bytes(SECRET_BYTES)


def load_secret(path: str | Path) -> bytes:
    """The secret in the file at `path`; white space around it is ignored.

    A file that other users may read is accepted with a warning, since mounted Kubernetes secrets look like that.

    Raises:
        ConfigError: The file cannot be read, or does not hold 64 hex digits. Its content is not shown.
    """
    file = Path(path)
    try:
        text = file.read_text("ascii").strip()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"security.secret_file: cannot read {file}: {error}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users may read the cluster secret", path=str(file), mode=oct(stat.S_IMODE(mode)))
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"security.secret_file: {file} must hold {SECRET_BYTES} bytes as {2 * SECRET_BYTES} hex digits; "
            f"it holds {len(text)} characters. Make one with `openssl rand -hex {SECRET_BYTES}`"
        )
    return secret


def save_secret(secret: bytes, path: str | Path) -> None:
    """Write `secret` to a new file that its owner alone may read.

    Raises:
        FileExistsError: There is such a file already.
    """
    file = Path(path)
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secret.hex() + "\n", "ascii")
