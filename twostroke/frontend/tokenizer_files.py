"""Reads the text side of a model's folder as `transformers` reads it, without `transformers`.

`tokenizer.json` (needed) decides how text becomes ids: `add_bos_token` and `add_eos_token` in `tokenizer_config.json`
are ignored beside it, as `transformers` ignores them. `tokenizer_config.json` and `special_tokens_map.json` name the
special tokens, which are added to a tokenizer that does not know them as such, and say whether to clean up spaces;
`chat_template.jinja`, or else the template in `tokenizer_config.json`, renders chats; `generation_config.json` has the
sampling defaults.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from twostroke.protocol.config import UseDefaults
from twostroke.protocol.errors import ModelError
from twostroke.protocol.sampling import SamplingParams

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise: the model's `generation_config.json`, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model's folder says about text.

    Attributes:
        tokenizer: With all special tokens.
        chat_template: Jinja source; None if there is none.
        special_tokens: Name and text of each, as templates name them.
        clean_up_spaces: Decoded text loses the spaces before punctuation.
        defaults: Sampling defaults.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    clean_up_spaces: bool
    defaults: SamplingDefaults


def read_tokenizer_files(folder: Path, use_defaults: UseDefaults) -> TokenizerFiles:
    """Read a model's folder.

    Raises:
        ModelError: It has no `tokenizer.json`, or a file in it cannot be read or used.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer in its fast form there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{file} cannot be read: {error}") from error
    config = _read(folder / "tokenizer_config.json", _TokenizerConfig)
    named = {**_read(folder / "special_tokens_map.json", _SpecialTokens).named(), **config.named()}
    _add_special_tokens(tokenizer, [*config.declared(), *named.values(), *config.extra()])
    return TokenizerFiles(
        tokenizer,
        chat_template=_template_source(folder, config),
        special_tokens={name: token.content for name, token in named.items()},
        # The clean-up was made for WordPiece and spoils BPE, so `transformers` skips it there.
        clean_up_spaces=bool(config.clean_up_tokenization_spaces) and not isinstance(tokenizer.model, models.BPE),
        defaults=_sampling_defaults(folder) if use_defaults is UseDefaults.AUTO else SamplingDefaults(),
    )


def _add_special_tokens(tokenizer: Tokenizer, wanted: "list[_AddedToken]") -> None:
    """Make special what the configuration names and the tokenizer does not hold as an added token."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in wanted:
        if token.content not in known:
            known.add(token.content)
            tokenizer.add_tokens([token.added()])


class _AddedToken(msgspec.Struct):
    """A token that is matched before the text is split."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = True

    def added(self) -> AddedToken:
        return AddedToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=not self.special if self.normalized is None else self.normalized,
            special=self.special,
        )


_Token = str | _AddedToken


def _token(given: _Token) -> _AddedToken:
    return _AddedToken(given) if isinstance(given, str) else given


class _SpecialTokens(msgspec.Struct):
    """The special tokens that templates may name."""

    bos_token: _Token | None = None
    eos_token: _Token | None = None
    unk_token: _Token | None = None
    sep_token: _Token | None = None
    pad_token: _Token | None = None
    cls_token: _Token | None = None
    mask_token: _Token | None = None

    def named(self) -> dict[str, _AddedToken]:
        """Those that are set, by name."""
        given = {name: getattr(self, name) for name in _SpecialTokens.__struct_fields__}
        return {name: _token(token) for name, token in given.items() if token is not None}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(_SpecialTokens):
    chat_template: str | list[_NamedTemplate] | None = None
    clean_up_tokenization_spaces: bool | None = None
    added_tokens_decoder: dict[str, _AddedToken] | None = None
    additional_special_tokens: list[_Token] | None = None
    extra_special_tokens: list[_Token] | dict[str, _Token] | None = None

    def declared(self) -> list[_AddedToken]:
        """Tokens that are listed with their ids, in the ids' order: a new one gets the next free id."""
        listed = self.added_tokens_decoder or {}
        return [listed[token_id] for token_id in sorted(listed, key=int)]

    def extra(self) -> list[_AddedToken]:
        """Special tokens without a name of their own."""
        extra = self.extra_special_tokens or []
        others = extra.values() if isinstance(extra, dict) else extra
        return [_token(token) for token in (*(self.additional_special_tokens or []), *others)]


class _GenerationConfig(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def defaults(self) -> SamplingDefaults:
        """Those that are set.

        Raises:
            ValueError: A value is outside its range.
        """
        given = {name: getattr(self, name) for name in _GenerationConfig.__struct_fields__}
        defaults = SamplingDefaults(**{name: value for name, value in given.items() if value is not None})
        defaults = replace(defaults, top_k=max(defaults.top_k, 0))
        SamplingParams(**asdict(defaults))
        return defaults


def _read(file: Path, kind: type[S]) -> S:
    """The JSON file as `kind`; all defaults if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    file = folder / "generation_config.json"
    try:
        return _read(file, _GenerationConfig).defaults()
    except ValueError as error:
        raise ModelError(f"{file}: {error}; correct it, or set model.generation_config to ignore") from error


def _template_source(folder: Path, config: _TokenizerConfig) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(config.chat_template, list):
        named = {entry.name: entry.template for entry in config.chat_template}
        return named.get("default")
    return config.chat_template
