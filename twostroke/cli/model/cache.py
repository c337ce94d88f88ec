"""The cache of converted models: where it is, who may write to it, and whether a model in it is whole.

Within the cache's folder:

<cache>/models/<name>/...                     the Hugging Face folder
<cache>/models/<name>/twostroke-manifest.json its files as they were when the conversion had been checked
<cache>/models/.<name>-<random>               a conversion in progress; renamed to <name> as its last step
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from twostroke.protocol.errors import ModelError

MANIFEST = "twostroke-manifest.json"
_CHUNK = 1 << 22
_LOCK_DEADLINE_S = 900.0
_LOCK_POLL_S = 0.2


class CachedFile(msgspec.Struct, frozen=True):
    """One file of a cached model.

    Attributes:
        name: File name within the folder.
        size: Bytes.
        mtime_ns: Time of its last change; while size and time are as recorded the file counts as unchanged.
        sha256: Digest of its content, compared where the time differs.
    """

    name: str
    size: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a cached model was made from, and its files.

    Attributes:
        recipe: Package and version of the conversion; a model made by another recipe is made anew.
        files: All files of the folder but this manifest.
    """

    recipe: str
    files: tuple[CachedFile, ...]


def cache_root() -> Path:
    """`$TWOSTROKE_CACHE`, or `~/.cache/twostroke`."""
    named = os.environ.get("TWOSTROKE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "twostroke"


def models_folder() -> Path:
    """Where converted models are."""
    return cache_root() / "models"


def record(folder: Path, recipe: str) -> None:
    """Write the manifest of a folder that was checked."""
    files = tuple(_describe(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(recipe, files))))


def fault(folder: Path, recipe: str | None = None) -> str | None:
    """Why the folder cannot be used, or None if it is whole.

    Args:
        folder: A cached model.
        recipe: What it should have been made by; None accepts any.
    """
    if not folder.is_dir():
        return "not fetched yet"
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        return f"no readable manifest ({error})"
    if recipe is not None and manifest.recipe != recipe:
        return f"made by {manifest.recipe}, not by {recipe}"
    faults = (_file_fault(folder / file.name, file) for file in manifest.files)
    return next((found for found in faults if found), None)


@contextlib.contextmanager
def exclusive(on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the cache's lock, so that two set-ups do not convert the same model.

    Args:
        on_wait: Called once if somebody else holds the lock.

    Raises:
        ModelError: The lock was not free within 15 minutes.
    """
    models_folder().mkdir(parents=True, exist_ok=True)
    path = models_folder() / ".lock"
    with path.open("w") as lock:
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        waited = False
        while not _try_lock(lock.fileno()):
            if not waited:
                on_wait()
                waited = True
            if time.monotonic() > deadline:
                raise ModelError(f"another process has held {path} for {_LOCK_DEADLINE_S:.0f} s; end it and try again")
            time.sleep(_LOCK_POLL_S)
        yield


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` if the body succeeds, and vanishes otherwise. Needs the lock."""
    prefix = f".{folder.name}-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # by a conversion that was killed
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe(path: Path) -> CachedFile:
    status = path.stat()
    return CachedFile(path.name, status.st_size, status.st_mtime_ns, sha256(path))


def _file_fault(path: Path, expected: CachedFile) -> str | None:
    try:
        status = path.stat()
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if status.st_size != expected.size:
        return f"{path.name}: {status.st_size} bytes, {expected.size} expected"
    if status.st_mtime_ns != expected.mtime_ns and sha256(path) != expected.sha256:
        return f"{path.name}: its content has changed"
    return None


def sha256(path: Path) -> str:
    """Digest of a file, in hex, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
