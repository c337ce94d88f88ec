"""What is read from a model folder, and which folders and settings are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import save_tiny_model
from twostroke.engine.model_loader import load_model
from twostroke.protocol.config import Dtype, ModelConfig
from twostroke.protocol.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16."""
    return save_tiny_model(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def test_dtype_and_length_come_from_the_checkpoint_unless_set(llama: Path) -> None:
    """`auto` takes the checkpoint's dtype; a smaller length is taken over."""
    own = load_model(ModelConfig(path=str(llama)))
    assert (own.dtype, own.max_model_len, own.eos_token_ids) == (torch.bfloat16, 512, (1,))
    assert {parameter.dtype for parameter in own.module.parameters()} == {torch.bfloat16}
    chosen = load_model(ModelConfig(path=str(llama), dtype=Dtype.FLOAT32, max_model_len=100))
    assert (chosen.dtype, chosen.max_model_len) == (torch.float32, 100)


def test_generation_config_names_the_end_tokens(copy: Path) -> None:
    """generation_config.json wins over config.json."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load_model(ModelConfig(path=str(copy))).eos_token_ids == (4, 9)


@pytest.mark.parametrize("content", ["{not json", "[1]", '{"eos_token_id": "<end>"}', '{"eos_token_id": [1, null]}'])
def test_a_generation_config_that_cannot_be_read_is_refused_by_name(copy: Path, content: str) -> None:
    """The folder is at fault, not the worker; a text instead of an id must not reach the wire."""
    (copy / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"copy/generation_config.json cannot be read: .*; correct it or remove it"):
        load_model(ModelConfig(path=str(copy)))


@pytest.mark.parametrize("kept", [0, 5, 2000])
def test_a_weight_file_that_was_copied_in_part_is_refused(copy: Path, kept: int) -> None:
    """Nothing, half a header, or half the tensors of it."""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"copy: a weight file is damaged or was copied only in part"):
        load_model(ModelConfig(path=str(copy)))


def test_settings_that_do_not_fit_are_refused(llama: Path) -> None:
    """A length above the model's limit (both numbers are named), and a dtype that is not served on CPU."""
    with pytest.raises(ConfigError, match=r"model.max_model_len: 513 is above the model's limit of 512"):
        load_model(ModelConfig(path=str(llama), max_model_len=513))
    with pytest.raises(ConfigError, match=r"model.dtype: the configured float16 .* set float32 or bfloat16"):
        load_model(ModelConfig(path=str(llama), dtype=Dtype.FLOAT16))


def test_incomplete_folders_are_refused(copy: Path, tmp_path: Path) -> None:
    """No folder, no config, no safetensors, or weights that lack a tensor: each says what is missing."""
    with pytest.raises(ModelError, match=r"model.path: '.*nowhere' is no folder"):
        load_model(ModelConfig(path=str(tmp_path / "nowhere")))
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weight files lack 1 tensors: model.norm.weight"):
        load_model(ModelConfig(path=str(copy)))
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model.safetensors nor .* convert the model to safetensors"):
        load_model(ModelConfig(path=str(copy)))
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json is missing"):
        load_model(ModelConfig(path=str(copy)))
