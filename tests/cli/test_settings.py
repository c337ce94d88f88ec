"""From YAML and options to a configuration, and what is said of mistakes."""

from pathlib import Path

import pytest

from twostroke.cli.settings import check_folder_is_whole, check_model_path, load_settings
from twostroke.protocol.config import ClusterConfig, Dtype
from twostroke.protocol.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration file that sets a little of everything."""
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {path: /models/m}\nrouter: {port: 9000}\ncontext: {kv_cache: {block_size: 32}}\n")
    return path


def test_no_file_and_no_options_are_the_defaults() -> None:
    """Every setting has a default."""
    assert load_settings(None) == ClusterConfig()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """An empty document is valid YAML."""
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert load_settings(empty) == ClusterConfig()


def test_options_win_over_assignments_over_the_file(file: Path) -> None:
    """And what none of them names stays as the file has it."""
    config = load_settings(
        file,
        ["router.port=9001", "context.kv_cache.num_blocks=64", "context.max_sequences=8"],
        {"router.port": 9002, "model.dtype": Dtype.FLOAT32, "model.path": None},
    )
    assert config.router.port == 9002
    assert config.context.kv_cache.num_blocks == 64
    assert config.context.kv_cache.block_size == 32
    assert config.context.max_sequences == 8
    assert config.model.dtype is Dtype.FLOAT32
    assert config.model.path == "/models/m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {prot: 1}", r"cluster.yaml: router.prot: there is no such setting; there are host, port, "),
        ("router: {port: 70000}", r"cluster.yaml: router.port: expected a whole number <= 65535, got 70000"),
        (
            "generation: {kv_cache: {block_size: 0}}",
            r"generation.kv_cache.block_size: expected a whole number >= 1, got 0",
        ),
        ("router: {port: 1, port: 2}", r"cluster.yaml: no valid YAML: `port` is set twice .*line 1"),
        ("1: {port: 1}", r"cluster.yaml: every name of a setting must be a text"),
        ("- a list", r"cluster.yaml: expected a mapping of sections"),
        ("router: {port: [", r"cluster.yaml: no valid YAML: .*line 1"),
        (
            "model: !!python/object/apply:os.getcwd []",
            r"cluster.yaml: no valid YAML: could not determine a constructor",
        ),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    """Including YAML tags that would run code, which are never followed."""
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(path)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("router.port", "expected dotted.path=value"),
        ("router.port=x", "options: router.port: expected a whole number, got 'x'"),
        ("router.port.deep=1", "`port` is no section but 9000"),
        ("router.port=[", "the value is no valid YAML"),
    ],
)
def test_mistakes_in_assignments_are_named(file: Path, assignment: str, message: str) -> None:
    """`--set` takes any path, so it must say which was wrong."""
    with pytest.raises(ConfigError, match=message):
        load_settings(file, [assignment])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read: .*No such file"):
        load_settings(tmp_path / "absent.yaml")


def test_local_model_folders_are_made_absolute_and_hub_names_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts must not depend on the folder that the command was typed in."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert check_model_path("m") == str(tmp_path / "m")
    assert check_model_path("someone/some-model") == "someone/some-model"


@pytest.mark.parametrize(("path", "message"), [("./absent", "does not exist"), (".", "holds no config.json")])
def test_folders_without_a_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    """Before anything is started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_model_path(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "model.safetensors"], "holds no tokenizer.json; save the tokenizer"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "holds none of model.safetensors, .*convert"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused_before_anything_starts(
    tmp_path: Path, files: list[str], message: str
) -> None:
    """The servers would say so too, but only after the model libraries are loaded."""
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        check_folder_is_whole(str(tmp_path))


def test_whole_folders_and_hub_names_pass(tmp_path: Path) -> None:
    """A sharded model has an index instead of one file."""
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (tmp_path / name).touch()
    check_folder_is_whole(str(tmp_path))
    check_folder_is_whole("someone/some-model")
