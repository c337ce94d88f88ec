"""A name for what a model folder holds: two roles, or two blocks of a prefix cache, go together only if it is equal.

Reading all weights would take minutes where the library maps them in seconds. So the digest covers the configuration,
the index, each weight file's header (tensor names, types, shapes and offsets), and a few bytes from the middle of every
tensor: training on changes at least some tensors throughout, and a new version of the weights has another digest.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from twostroke.protocol.errors import ModelError

WEIGHT_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SAMPLE_BYTES = 256
"""Of each tensor: a disk reads a page of 4 KiB for them in any case."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    """An entry of a weight file's header; the one called `__metadata__` has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


def model_digest(folder: Path) -> str:
    """SHA-256 (hex) over config.json, the weight index if there is one, and samples of all weight files.

    Raises:
        ModelError: config.json or the weights are missing, or the index or a weight file is damaged.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder}: config.json is missing; give a Hugging Face model folder")
    digest = hashlib.sha256(config.read_bytes())
    index, single = folder / WEIGHT_INDEX, folder / SINGLE_FILE
    if index.is_file():
        text = index.read_bytes()
        digest.update(text)
        names = _weight_files(index, text)
    elif single.is_file():
        names = [SINGLE_FILE]
    else:
        raise ModelError(
            f"{folder}: neither {SINGLE_FILE} nor {WEIGHT_INDEX} is there; other weight formats are not "
            "loaded, since some can run code: convert the model to safetensors"
        )
    try:
        for name in names:
            for part in _samples(folder / name):
                digest.update(part)
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: the weight file {name} is missing; was the folder copied only in part?") from error
    except (msgspec.DecodeError, OSError, OverflowError, RecursionError, ValueError) as error:
        raise ModelError(f"{folder}: a weight file is damaged or was copied only in part: {name}: {error}") from error
    return digest.hexdigest()


def _weight_files(index: Path, text: bytes) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(text, type=_Index).weight_map.values()))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read: {error}; copy it again") from error


def _samples(file: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and the middle of each of its tensors in the order of their offsets.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        msgspec.DecodeError: It is no safetensors file.
    """
    if file.exists() and not file.is_file():
        raise OSError("it is no file")  # a pipe would be waited for
    with file.open("rb") as weights:
        length = int.from_bytes(weights.read(_LENGTH_BYTES), "little")
        header = weights.read(min(length, _MAX_HEADER_BYTES))
        yield header
        data = _LENGTH_BYTES + length
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
        for begin, end in sorted(tensor.data_offsets for tensor in tensors):
            middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
            yield os.pread(weights.fileno(), min(SAMPLE_BYTES, end - middle), data + middle)
