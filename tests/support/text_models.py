"""Model folders with tokenizers of the kinds that differ in how they decode, for comparisons with `transformers`."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

WORDS = ("<unk>", "<s>", "</s>", "▁hello", "▁world", "a", "é", "▁", "日", "👍", "'s", "▁.")
"""The first tokens of the byte-fallback vocabulary; the 256 byte tokens follow."""


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models are converted: `▁` for spaces, byte tokens, a leading space stripped."""
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=WORDS[0], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in WORDS[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """A vocabulary whose decoder joins words by spaces, which the clean-up takes from before punctuation."""
    tokens = ["[UNK]", "don", "it", "'s", "n't", "'", ".", ",", "?", "!", "'m", "'ve", "'re", "n", "re", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **config: object) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
