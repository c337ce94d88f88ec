"""From a YAML file and the command line to one checked configuration.

Options win over the file, the file over the defaults. `--set context.kv_cache.block_size=32` reaches
what has no option.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from twostroke.protocol.config import ClusterConfig, parse_config
from twostroke.protocol.errors import ConfigError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

Overrides = Mapping[str, object]
"""Dotted path to value; None leaves the file's value."""


def load_settings(
    file: Path | None, assignments: Sequence[str] = (), overrides: Overrides | None = None
) -> ClusterConfig:
    """The configuration that a command runs with.

    Args:
        file: YAML document; None starts from the defaults.
        assignments: `dotted.path=value` texts, the value in YAML.
        overrides: Values of options, by dotted path; they win over `assignments`.

    Raises:
        ConfigError: With file and dotted path of the first wrong setting.
    """
    document = _read(file)
    for assignment in assignments:
        path, value = _parse_assignment(assignment)
        _assign(document, path, value)
    given = {path: value for path, value in (overrides or {}).items() if value is not None}
    for path, value in given.items():
        _assign(document, path, value)
    return parse_config(document, _source(file, with_options=bool(assignments or given)))


class _OnceEachLoader(yaml.SafeLoader):
    """YAML without code, in which a setting may stand once: PyYAML would let the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  (as in the base class)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"`{twice}` is set twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _read(file: Path | None) -> dict[object, object]:
    if file is None:
        return {}
    try:
        document = yaml.load(file.read_text(), _OnceEachLoader)  # noqa: S506  (a safe loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: no valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: expected a mapping of sections such as `model:`, got {type(document).__name__}")
    return document


def _parse_assignment(text: str) -> tuple[str, object]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text}: expected dotted.path=value")
    try:
        return path, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: the value is no valid YAML") from None


def _assign(document: dict[object, object], path: str, value: object) -> None:
    """Set `document[a][b] = value` for the path `a.b`, making the sections between."""
    *sections, last = path.split(".")
    here = document
    for section in sections:
        inner = here.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: `{section}` is no section but {inner!r}")
        here = inner
    here[last] = value


def _source(file: Path | None, *, with_options: bool) -> str:
    if file is None:
        return "options"
    return f"{file} with options" if with_options else str(file)


def with_model(config: ClusterConfig, path: str) -> ClusterConfig:
    """The same configuration for the model at `path`."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def check_folder_is_whole(path: str) -> None:
    """Look for what a server will read, before processes are started that would find it missing much later.

    Raises:
        ConfigError: The local folder holds no tokenizer or no weights. A hub name is not looked at.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path: {path} holds no tokenizer.json; save the tokenizer in its fast form there")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise ConfigError(f"model.path: {path} holds none of {', '.join(_WEIGHTS)}; convert the weights to safetensors")


def check_model_path(path: str) -> str:
    """The model's path made absolute, if it names a local folder; a hub name stays as it is.

    Raises:
        ConfigError: A local folder that does not exist or holds no model.
    """
    local = Path(path).expanduser()
    if not local.exists():
        if path.startswith(("/", ".", "~")):
            raise ConfigError(f"model.path: {path} does not exist")
        return path
    if not (local / "config.json").is_file():
        raise ConfigError(f"model.path: {path} holds no config.json; name the folder of a Hugging Face model")
    return str(local.resolve())
