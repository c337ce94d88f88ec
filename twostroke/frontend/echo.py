"""The prompt as the beginning of a completion (`echo`).

A prompt that was given as text is echoed as that text; token ids as their text, special tokens left out. The output
goes on from the prompt: it is decoded behind the prompt's last tokens, since some tokenizers drop a space at the start
of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.frontend.tokenizer import TextModel

CONTEXT_TOKENS = 64
"""Tokens of the prompt behind which the output is decoded; longer runs of bytes in one character do not occur."""


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt.

    Attributes:
        text: What the completion begins with.
        offsets: Where each token begins in the text, in characters; empty if nobody asked for logprobs.
        held: Characters of `text` that decoding gives only with the output, and that must not come twice.
    """

    text: str
    offsets: Sequence[int]
    held: int


def make_echo(model: TextModel, token_ids: list[int], given: str | None, *, with_offsets: bool) -> Echo:
    """The echo of a prompt; `given` is its text, if the client gave one."""
    stream = model.detokenizer()
    offsets: list[int] = []
    if with_offsets:
        certain = ""
        for token_id in token_ids:
            offsets.append(len(certain))
            certain += stream.push([token_id])
    else:
        certain = stream.push(token_ids)
    if given is None:
        return Echo(certain, offsets, held=0)
    return Echo(given, offsets, held=len(stream.finish()))
