"""Loads a model folder with the model library, and says what the engine must know of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError

from twostroke.engine.library_attention import ATTENTION_NAME, register
from twostroke.engine.model_digest import model_digest
from twostroke.engine.model_support import check_config, check_rope
from twostroke.protocol.config import Dtype, ModelConfig
from twostroke.protocol.errors import ConfigError, ModelError

_TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
_DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


class _GenerationConfig(msgspec.Struct):
    """What the engine needs of `generation_config.json`."""

    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """How a folder's model would run; next to nothing of its weights is read for that.

    Attributes:
        folder: The local folder.
        config: The model library's configuration of it.
        digest: Names config and weights; see `model_digest`.
        dtype: Of weights, activations and cache.
        max_model_len: Positions that may be served.
        eos_token_ids: Tokens that end a sequence, ascending.
    """

    folder: Path
    config: Any
    digest: str
    dtype: torch.dtype
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        module: The library's causal language model, with our attention plugged in.
        config: Its configuration.
        digest: Names config and weights; see `model_digest`.
        dtype: Of weights, activations and cache.
        max_model_len: Positions that may be served.
        eos_token_ids: Tokens that end a sequence, ascending.
    """

    module: torch.nn.Module
    config: Any
    digest: str
    dtype: torch.dtype
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load_model(model: ModelConfig) -> LoadedModel:
    """Load `model` for the CPU.

    Raises:
        ConfigError: `model.dtype` or `model.max_model_len` does not go with this model.
        ModelError: The folder is missing, incomplete, or holds a model that cannot be served.
    """
    plan = plan_model(model)
    module = _load_weights(plan.folder, plan.config, plan.dtype)
    return LoadedModel(module, module.config, plan.digest, plan.dtype, plan.max_model_len, plan.eos_token_ids)


def plan_model(model: ModelConfig) -> ModelPlan:
    """Find `model`'s folder, and check that what it holds can be served as configured.

    Raises:
        ConfigError: `model.dtype` or `model.max_model_len` does not go with this model.
        ModelError: The folder is missing, incomplete, or holds a model that cannot be served.
    """
    folder = find_folder(model.path)
    digest = model_digest(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: config.json cannot be read by the model library: {error}") from error
    check_config(config)
    max_model_len = choose_max_model_len(config, model.max_model_len)
    check_rope(config, max_model_len)
    dtype = choose_dtype(config, model.dtype)
    eos_token_ids = read_eos_ids(folder, config)  # before the library, which takes the file without a check
    return ModelPlan(folder, config, digest, dtype, max_model_len, eos_token_ids)


def find_folder(path: str) -> Path:
    """The local folder of `path`; a name that is no local folder is fetched from the hub, and only then.

    Raises:
        ModelError: There is no such folder, and the hub does not have it or cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or not path:
        raise ModelError(f"model.path: {path!r} is no folder; give a local Hugging Face folder or a hub name")
    try:
        return Path(snapshot_download(path, allow_patterns=list(_DOWNLOADED)))
    except Exception as error:  # the hub client raises errors of many libraries
        raise ModelError(f"model.path: {path!r} is no local folder, and the hub did not give it: {error}") from error


def choose_max_model_len(config: Any, wanted: int | None) -> int:
    """The smaller of the model's limit and the option.

    Raises:
        ConfigError: The option is larger than the model's limit.
        ModelError: Neither is known.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None and wanted is None:
        raise ModelError("config.json has no max_position_embeddings; set model.max_model_len")
    if limit is not None and wanted is not None and wanted > limit:
        raise ConfigError(
            f"model.max_model_len: {wanted} is above the model's limit of {limit} positions; set at most {limit}"
        )
    return min(value for value in (limit, wanted) if value is not None)


def choose_dtype(config: Any, wanted: Dtype) -> torch.dtype:
    """The element type to run in; `AUTO` is the checkpoint's own.

    Raises:
        ConfigError: The type is neither float32 nor bfloat16.
    """
    own = str(config.dtype or torch.float32).removeprefix("torch.")
    name = own if wanted is Dtype.AUTO else wanted.value
    for dtype, torch_dtype in _TORCH_DTYPES.items():
        if dtype.value == name:
            return torch_dtype
    source = "the checkpoint's" if wanted is Dtype.AUTO else "the configured"
    raise ConfigError(f"model.dtype: {source} {name} is not served on CPU; set float32 or bfloat16")


def read_eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End-of-sequence ids from generation_config.json, or else from the config; ascending, empty if neither says.

    Raises:
        ModelError: generation_config.json is no JSON object, or its ids are no whole numbers.
    """
    file = folder / "generation_config.json"
    try:
        ids = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig).eos_token_id if file.is_file() else None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; correct it or remove it") from error
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(sorted(set(ids if isinstance(ids, list) else [ids])))


def _load_weights(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    register()
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    try:
        module, report = library.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ModelError(f"{folder}: a weight file is damaged or was copied only in part: {error}") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"{folder}: the model library cannot load this model: {error}") from error
    if report["missing_keys"]:  # the library would leave them random
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise ModelError(f"{folder}: the weight files lack {len(report['missing_keys'])} tensors: {names} ...")
    return module.eval().requires_grad_(False)
