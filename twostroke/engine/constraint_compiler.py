"""Compiles constraints away from the engine thread, and keeps them compiled for the next request with the same one."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Self

from llguidance import LLMatcher, LLTokenizer

from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.interfaces import ModelFacts
from twostroke.protocol.constraint import Constraint
from twostroke.protocol.errors import InvalidRequestError, ModelError, RequestError
from twostroke.protocol.grammar import grammar_of

COMPILED_GRAMMARS = 128
"""Compiled grammars that are kept."""


class ConstraintCompiler:
    """Compiles constraints for one model, on a thread of its own.

    Args:
        tokenizer: The model's vocabulary, as the grammar library reads it.
        vocab_size: Size of the logits.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "constraints")
        self._compiled = lru_cache(COMPILED_GRAMMARS)(self._compile)  # used by the thread alone

    @classmethod
    def load(cls, folder: Path, facts: ModelFacts) -> Self:
        """Read the vocabulary of the model in `folder`. Takes a second or more, and the interpreter with it.

        Raises:
            ModelError: The folder has no `tokenizer.json`, or one that does not go with the model.
        """
        file = folder / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
            tokenizer = LLTokenizer(text, n_vocab=facts.vocab_size, eos_token=list(facts.eos_token_ids) or None)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read, or does not go with the model: {error}") from error
        return cls(tokenizer, facts.vocab_size)

    def start(self, constraint: Constraint, generated_ids: Sequence[int]) -> "Future[TokenConstraint]":
        """Compile `constraint`, and follow the output so far.

        The future fails with `InvalidRequestError` where the constraint cannot be used or does not allow that output.
        """
        return self._thread.submit(self._start, constraint, generated_ids)

    def _start(self, constraint: Constraint, generated_ids: Sequence[int]) -> TokenConstraint:
        started = TokenConstraint(self._compiled(constraint).deep_copy(), self._vocab_size)
        if generated_ids:
            started.advance(generated_ids)
        return started

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0)
        except ValueError as error:
            raise InvalidRequestError(f"constraint ({constraint.kind}): {error}", "constraint") from None
        if matcher.is_error():
            raise InvalidRequestError(f"constraint ({constraint.kind}): {matcher.get_error()}", "constraint")
        return matcher


def outcome_of(future: "Future[TokenConstraint]") -> TokenConstraint | RequestError:
    """What became of a constraint that is done: the grammar library's own failures harm one request alone."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RequestError):
        return error
    return InvalidRequestError(f"the grammar library fails on the constraint: {error!r}", "constraint")
