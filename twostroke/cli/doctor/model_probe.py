"""Child of the doctor: whether the engine would take this model folder. Imports torch and transformers.

Reads everything but the weights themselves; of those it reads the headers, which name each tensor's shape.
"""

import math
import sys
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from twostroke.cli.doctor.child import answer_stream
from twostroke.cli.doctor.facts import ModelFacts, ModelQuestion, ServedModel
from twostroke.engine.model_facts import cache_geometry
from twostroke.engine.model_loader import plan_model
from twostroke.frontend.chat_template import ChatTemplate
from twostroke.frontend.tokenizer_files import read_tokenizer_files
from twostroke.protocol.config import UseDefaults
from twostroke.protocol.errors import ConfigError, ModelError


def look_at_model(question: ModelQuestion) -> ModelFacts:
    """What a worker and its frontend would say of the folder."""
    served, refusal = None, ""
    try:
        served = _served(question)
    except (ModelError, ConfigError) as error:
        refusal = str(error)
    try:
        files = read_tokenizer_files(Path(question.model.path), UseDefaults.AUTO)
        ChatTemplate(files.chat_template, files.special_tokens)
    except ModelError as error:
        return ModelFacts(served, refusal, tokenizer_error=str(error))
    return ModelFacts(served, refusal, files.tokenizer.get_vocab_size(), files.chat_template is not None)


def _served(question: ModelQuestion) -> ServedModel:
    plan = plan_model(question.model)
    geometry = cache_geometry(plan, question.block_size)
    return ServedModel(
        family=plan.config.model_type,
        layers=geometry.layers,
        dtype=str(plan.dtype).removeprefix("torch."),
        max_model_len=plan.max_model_len,
        vocab_size=plan.config.vocab_size,
        weight_bytes=_parameters(plan.folder) * plan.dtype.itemsize,
        block_bytes=geometry.block_bytes,
    )


def _parameters(folder: Path) -> int:
    """Numbers in all weight files."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "numpy") as weights:
                total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged or was copied only in part: {error}") from error
    return total


if __name__ == "__main__":
    with answer_stream() as stream:
        given = msgspec.json.decode(sys.argv[1], type=ModelQuestion)
        stream.write(msgspec.json.encode(look_at_model(given)))
