"""Which folders hold the same model."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import save_tiny_model
from twostroke.engine.model_digest import model_digest
from twostroke.protocol.errors import ModelError

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def split(folder: Path) -> None:
    """Spread the weights over two files and an index."""
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    index: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: weights[name] for name in part}, folder / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / WEIGHTS).unlink()


def test_it_covers_config_and_weight_header(llama: Path, copy: Path) -> None:
    """Equal folders share a digest; another config, or tensors of other shapes, have another."""
    assert model_digest(copy) == model_digest(llama)
    save_file({**load_file(copy / WEIGHTS), "extra": torch.zeros(1)}, copy / WEIGHTS)
    changed = model_digest(copy)
    assert changed != model_digest(llama)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    assert model_digest(copy) not in {changed, model_digest(llama)}


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_tensor_that_was_trained_on_changes_it(copy: Path, *, in_parts: bool) -> None:
    """Whichever of them it is, large or as small as a norm; names and shapes stay as they are."""
    save_file(load_file(copy / WEIGHTS), copy / WEIGHTS)  # as below, without the library's metadata
    if in_parts:
        split(copy)
    before = model_digest(copy)
    for file in sorted(copy.glob("*.safetensors")):
        weights = load_file(file)
        for name, tensor in weights.items():
            save_file({**weights, name: tensor * 1.01 + 0.001}, file)
            assert model_digest(copy) != before, name
        save_file(weights, file)
    assert model_digest(copy) == before


def test_damage_is_named(copy: Path) -> None:
    """A file of the index that is missing or damaged, and an index that is none."""
    split(copy)
    second, index = copy / "part-1.safetensors", copy / f"{WEIGHTS}.index.json"
    whole = second.read_bytes()
    for broken in (b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x0f" + bytes(7) + b'{"a":{"data_offs'):
        second.write_bytes(broken)
        with pytest.raises(ModelError, match=r"copy: a weight file is damaged or was .* part-1\.safetensors: "):
            model_digest(copy)
    for offsets in ([0, 1 << 70], [-500, 1], [9, 0]):
        header = json.dumps({"a": {"data_offsets": offsets}}).encode()
        second.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError, match="damaged"):
            model_digest(copy)
    deep = b'{"a":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    second.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ModelError, match="damaged"):
        model_digest(copy)
    second.unlink()
    os.mkfifo(second)
    with pytest.raises(ModelError, match="it is no file"):
        model_digest(copy)
    second.unlink()
    with pytest.raises(ModelError, match=r"the weight file part-1\.safetensors is missing"):
        model_digest(copy)
    second.write_bytes(whole)
    index.write_text("{")
    with pytest.raises(ModelError, match=r"index\.json cannot be read: .*; copy it again"):
        model_digest(copy)
