"""Convert a quantized GGUF file of a Llama-like model into a Hugging Face folder of bf16 safetensors.

    python -m twostroke.cli.model.convert FILE.gguf FOLDER

A process of its own, because it loads torch and transformers, which its caller must not. It prints one line for each
stage that it begins; what the libraries print goes to the error stream.
"""

import contextlib
import sys
from pathlib import Path

import torch
import transformers


def convert(gguf_file: Path, folder: Path) -> None:
    """Write weights, config, generation config, tokenizer and chat template of `gguf_file` into `folder`."""
    source, name = str(gguf_file.parent), gguf_file.name

    _stage("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    _stage("reading and dequantizing the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        local_files_only=True,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    _forget_quantization(model)
    _stage("writing the folder")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: transformers.PreTrainedModel) -> None:
    """The weights are plain now, but the model remembers where they came from and would refuse to be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The library types unknown attributes of a module as modules.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]


def _stage(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
