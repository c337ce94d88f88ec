"""Drops the spaces that some tokenizers leave before punctuation and contractions, as `transformers` drops them.

Only for models whose `tokenizer_config.json` asks for it (`clean_up_tokenization_spaces`), and whose vocabulary is no
BPE. The rules replace one after the other over the whole text. A stream gives the same: each rule begins with a space,
so text up to a character that no rule has before its last one is never touched by what follows; the rest is held back.
"""

from twostroke.frontend.detokenizer import TextStream

RULES = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""From `transformers`' `clean_up_tokenization`, in its order."""

_OPEN = " 'nvr"
"""Characters that some rule has before its last one: text that ends with them may be the start of a match."""


def clean_up_spaces(text: str) -> str:
    """`text` after all rules."""
    for spaced, plain in RULES:
        text = text.replace(spaced, plain)
    return text


class SpaceCleanup:
    """Cleans up what a detokenizer gives.

    Args:
        source: Gives the text of token ids.
    """

    def __init__(self, source: TextStream) -> None:
        self._source = source
        self._held = ""

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens; returns the text that is certain now."""
        text = self._held + self._source.push(token_ids)
        certain = len(text.rstrip(_OPEN))
        self._held = text[certain:]
        return clean_up_spaces(text[:certain])

    def finish(self) -> str:
        """The text held back; nothing follows."""
        held, self._held = self._held + self._source.finish(), ""
        return clean_up_spaces(held)
