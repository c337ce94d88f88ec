"""The text side of a model: tokenizer, chat template and sampling defaults, from its folder, without transformers.

Read from the folder: `tokenizer.json` (needed), `tokenizer_config.json` and `special_tokens_map.json` (special tokens),
`chat_template.jinja` or the template in `tokenizer_config.json`, and `generation_config.json` (sampling defaults).
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from twostroke.frontend.chat_template import ChatTemplate, Message
from twostroke.frontend.detokenizer import Detokenizer
from twostroke.frontend.token_bytes import TokenBytes
from twostroke.protocol.errors import InvalidRequestError, ModelError

OFFLOAD_CHARS = 4096
"""Texts longer than this (about 2 ms of work) are tokenized in a thread, so that the event loop goes on serving."""
TOKENIZING_THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise: the model's `generation_config.json`, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class TextModel:
    """Turns text and conversations into token ids, and token ids into text.

    Args:
        tokenizer: Encodes and decodes.
        chat_template: None for a model without one (then chat requests are refused).
        defaults: Sampling defaults.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.defaults = defaults or SamplingDefaults()
        self._silent = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes = TokenBytes(tokenizer)
        self._threads = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: str | Path) -> "TextModel":
        """Read the model folder `path`.

        Raises:
            ModelError: The folder has no `tokenizer.json`, or a file in it cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer in its fast form there")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelError(f"{file} cannot be read: {error}") from error
        config = _read(folder / "tokenizer_config.json", _TokenizerConfig)
        tokens_map = _read(folder / "special_tokens_map.json", _SpecialTokens)
        source = _template_source(folder, config)
        template = ChatTemplate(source, {**tokens_map.given(), **config.given()}) if source is not None else None
        return cls(tokenizer, template, _read(folder / "generation_config.json", _GenerationConfig).defaults())

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

    async def encode_text(self, text: str) -> list[int]:
        """The token ids of a completion's prompt; long texts are encoded in a thread."""
        return await self._offload(len(text), functools.partial(self.encode, text, add_special_tokens=True))

    async def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """The token ids of several prompts, encoded together."""

        def encode() -> list[list[int]]:
            return [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]

        return await self._offload(sum(map(len, texts)), encode)

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the prompt for the assistant's next message.

        Raises:
            InvalidRequestError: The model has no chat template, or the template refuses the messages.
        """
        template = self._chat_template
        if template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        prompt = template.render(messages)
        return await self._offload(len(prompt), functools.partial(self.encode, prompt, add_special_tokens=False))

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return Detokenizer(self)

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an unknown id."""
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, for logprobs: perhaps part of a character."""
        return self._bytes.of(token_id)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never has text: a special token, or an id beyond the vocabulary."""
        return token_id in self._silent or token_id >= self._size

    async def _offload(self, length: int, work: Callable[[], T]) -> T:
        if length <= OFFLOAD_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _AddedToken(msgspec.Struct):
    """A special token with its matching options; only its text matters here."""

    content: str


class _SpecialTokens(msgspec.Struct):
    """The special tokens that templates may name."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    cls_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None

    def given(self) -> dict[str, str]:
        """Name and text of those that are set."""
        tokens: dict[str, str] = {}
        for name in _SpecialTokens.__struct_fields__:
            token = getattr(self, name)
            if token is not None:
                tokens[name] = token if isinstance(token, str) else token.content
        return tokens


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(_SpecialTokens):
    chat_template: str | list[_NamedTemplate] | None = None


class _GenerationConfig(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def defaults(self) -> SamplingDefaults:
        return SamplingDefaults(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
        )


S = TypeVar("S", bound=msgspec.Struct)


def _read(file: Path, kind: type[S]) -> S:
    """The JSON file as `kind`; all defaults if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _template_source(folder: Path, config: _TokenizerConfig) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(config.chat_template, list):
        named = {entry.name: entry.template for entry in config.chat_template}
        return named.get("default")
    return config.chat_template
