"""The text side of a model: text and conversations to token ids, and token ids to text, without transformers."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from twostroke.frontend.chat_template import ChatTemplate, Conversation
from twostroke.frontend.detokenizer import ByteDetokenizer, Detokenizer, TextStream
from twostroke.frontend.space_cleanup import SpaceCleanup, clean_up_spaces
from twostroke.frontend.token_bytes import TokenBytes, byte_tokens
from twostroke.frontend.tokenizer_files import SamplingDefaults, read_tokenizer_files
from twostroke.protocol.config import UseDefaults

OFFLOAD_CHARS = 4096
"""Texts longer than this (about 2 ms of work) are tokenized in a thread, so that the event loop goes on serving."""
TOKENIZING_THREADS = 2

T = TypeVar("T")


class TextModel:
    """Turns text and conversations into token ids, and token ids into text.

    Args:
        tokenizer: Encodes and decodes.
        chat_template: Renders conversations; None for a model without a template.
        defaults: Sampling defaults.
        clean_up_spaces: Decoded text loses the spaces before punctuation, as the model's configuration asks.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
        *,
        clean_up_spaces: bool = False,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template or ChatTemplate(None, {})
        self._clean_up_spaces = clean_up_spaces
        self.defaults = defaults or SamplingDefaults()
        self._silent = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes = TokenBytes(tokenizer)
        self._byte_tokens = byte_tokens(tokenizer)
        self._threads = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: str | Path, use_defaults: UseDefaults = UseDefaults.AUTO) -> "TextModel":
        """Read the model folder `path`; see `read_tokenizer_files`.

        Raises:
            ModelError: The folder has no `tokenizer.json`, or a file in it cannot be read.
        """
        files = read_tokenizer_files(Path(path), use_defaults)
        template = ChatTemplate(files.chat_template, files.special_tokens)
        return cls(files.tokenizer, template, files.defaults, clean_up_spaces=files.clean_up_spaces)

    @property
    def chat_template(self) -> str:
        """Source of the model's own chat template; "" for a model without one."""
        return self._chat_template.source or ""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`.

        Args:
            text: Any text.
            add_special_tokens: Add what the model's tokenizer adds around a text (a rendered chat has them already).
        """
        if len(text) <= OFFLOAD_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike `encode`, `encode_batch` releases the interpreter lock while it works; for short texts it costs more.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a completion's prompt; long texts are encoded in a thread."""
        encode = functools.partial(self.encode, text, add_special_tokens=add_special_tokens)
        return await self._offload(len(text), encode)

    async def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """The token ids of several prompts, encoded together."""

        def encode() -> list[list[int]]:
            return [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]

        return await self._offload(sum(map(len, texts)), encode)

    async def encode_chat(self, conversation: Conversation, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a rendered conversation.

        Raises:
            InvalidRequestError: There is no chat template, or it refuses the messages.
        """

        def encode() -> list[int]:
            return self.encode(self._chat_template.render(conversation), add_special_tokens=add_special_tokens)

        return await self._offload(conversation.size, encode)

    def detokenizer(self) -> TextStream:
        """A fresh incremental decoder for one sequence."""
        detokenizer = ByteDetokenizer(self._bytes.decoded) if self._bytes.byte_level else Detokenizer(self)
        return SpaceCleanup(detokenizer) if self._clean_up_spaces else detokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` before spaces are cleaned up; ids beyond the vocabulary have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def whole_text(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` as a client gets it."""
        text = self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self._clean_up_spaces else text

    async def decode_text(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens included; many are decoded in a thread."""
        return await self._offload(
            len(token_ids), functools.partial(self.whole_text, token_ids, skip_special_tokens=False)
        )

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an unknown id."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, for logprobs: perhaps part of a character."""
        return self._bytes.of(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte, as `<0xE2>` does."""
        return token_id in self._byte_tokens

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never has text: a special token, or an id beyond the vocabulary."""
        return token_id in self._silent or token_id >= self._size

    async def _offload(self, length: int, work: Callable[[], T]) -> T:
        if length <= OFFLOAD_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
