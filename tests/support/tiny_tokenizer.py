"""A small byte-level tokenizer made on the spot: every text can be encoded, characters may span tokens.

`save_tiny_tokenizer(folder)` makes it part of a model folder, as `transformers` would lay it out.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
TURN = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, TURN, TURN_END)
"""They get the ids 0, 1 and 2."""
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "user assistant system: hello world, how are you today? Numbers 0123456789 and more.",
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, three special tokens and some merges; no id is beyond `VOCAB_SIZE`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return tokenizer


def save_tiny_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with special tokens and a chat template into `folder`."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
