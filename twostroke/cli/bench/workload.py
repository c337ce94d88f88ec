"""What is asked of the endpoint: prompts, output lengths and, for an open loop, when each request is due."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from twostroke.protocol.errors import ConfigError

FIRST_TOKEN_ID = 10
"""Ids below it are special tokens in many vocabularies."""
WORDS = ("time", "year", "people", "way", "day", "thing", "world", "life", "hand", "part", "place", "case", "week")


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Token counts drawn uniformly from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, option: str) -> "LengthRange":
        """Read `128` or `64:512`.

        Raises:
            ConfigError: It is neither; the message names `option`.
        """
        first, colon, second = text.partition(":")
        try:
            least = int(first)
            most = int(second) if colon else least
        except ValueError:
            raise ConfigError(
                f"{option}: expected a length such as 128 or a range such as 64:512, not {text}"
            ) from None
        if not 1 <= least <= most:
            raise ConfigError(f"{option}: {text} is no range of at least 1 token")
        return cls(least, most)

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Work:
    """One request to send.

    Attributes:
        prompt: Token ids, or text.
        output_tokens: How many tokens to ask for.
        due_s: Seconds after the start at which it is sent; None as soon as a place is free.
    """

    prompt: list[int] | str
    output_tokens: int
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of a given length that share no prefix.

    Attributes:
        vocab_size: Token ids are drawn below it.
        text: Words instead of token ids, one a token; how many tokens they are is the server's tokenizer's affair.
    """

    vocab_size: int
    text: bool

    def make(self, length: int, source: random.Random) -> list[int] | str:
        """One prompt."""
        if self.text:
            return " ".join(source.choices(WORDS, k=length))
        return [source.randrange(FIRST_TOKEN_ID, self.vocab_size) for _ in range(length)]


def synthetic(maker: PromptMaker, prompt: LengthRange, output: LengthRange, seed: int) -> Iterator[Work]:
    """Requests without end; the same seed gives the same ones."""
    source = random.Random(seed)  # noqa: S311 - reproducible load, not cryptography
    while True:
        yield Work(maker.make(prompt.draw(source), source), output.draw(source))


def poisson(works: Iterator[Work], rate: float, seed: int) -> Iterator[Work]:
    """The same requests, due at the arrivals of a Poisson process of `rate` a second; the first one at once."""
    source = random.Random(seed + 1)  # noqa: S311 - likewise
    due_s = 0.0
    for work in works:
        yield replace(work, due_s=due_s)
        due_s += source.expovariate(rate)


class _TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    output_tokens: int
    at_s: float | None = None
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None


def read_trace(path: Path, maker: PromptMaker, seed: int) -> list[Work]:
    """The requests of a JSONL file, in order of arrival.

    Each line has `output_tokens`, one of `prompt` (text), `prompt_ids` and `prompt_tokens` (a length), and perhaps
    `at_s`, seconds after the start.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line is wrong; names the line.
    """
    source = random.Random(seed)  # noqa: S311 - reproducible load, not cryptography
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from None
    works = [
        _trace_work(line, f"--trace: {path}:{number}", maker, source)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not works:
        raise ConfigError(f"--trace: {path} holds no requests")
    if len({work.due_s is None for work in works}) > 1:
        raise ConfigError(f"--trace: {path}: either all lines have `at_s` or none")
    return sorted(works, key=lambda work: work.due_s or 0.0)


def _trace_work(line: bytes, where: str, maker: PromptMaker, source: random.Random) -> Work:
    try:
        fields = msgspec.json.decode(line, type=_TraceLine)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from None
    length = fields.prompt_tokens
    drawn = maker.make(length, source) if length else None
    given = [prompt for prompt in (fields.prompt, fields.prompt_ids, drawn) if prompt]
    if len(given) != 1:
        raise ConfigError(f"{where}: needs exactly one of `prompt`, `prompt_ids` and `prompt_tokens`, not empty")
    if fields.output_tokens < 1 or (fields.at_s or 0.0) < 0:
        raise ConfigError(f"{where}: `output_tokens` must be at least 1 and `at_s` not negative")
    return Work(given[0], fields.output_tokens, fields.at_s)


def limited(works: Iterator[Work], count: int | None) -> Iterator[Work]:
    """The first `count` of them; all without."""
    return works if count is None else itertools.islice(works, count)
