"""From a constraint to the grammar that llguidance reads: the one place that decides what a constraint means.

Frontends check the grammar before anything runs, workers compile it; both get it from here. JSON may hold white space
between its tokens, but only `MAX_SPACES` in a row: models would otherwise fill their context with it.
"""

from llguidance import LLMatcher

from twostroke.protocol.constraint import Constraint, ConstraintKind

MAX_SPACES = 40
"""Enough to indent ten levels by four."""
JSON_OPTIONS = {"whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_SPACES}}}"}
"""The library's options for JSON; a schema carries them under its key `x-guidance`."""


def grammar_of(constraint: Constraint) -> str:
    """The grammar of `constraint`, not checked yet.

    Raises:
        ValueError: The text is no JSON where it must be.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type] # a TypedDict
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.LARK:
            return LLMatcher.grammar_from_lark(constraint.text)


def grammar_error(constraint: Constraint) -> str | None:
    """Why a constraint cannot be used, as far as can be told without a vocabulary; None if nothing is wrong.

    Takes a millisecond for usual constraints, and tens of them for large ones.
    """
    try:
        return LLMatcher.validate_grammar(grammar_of(constraint)) or None
    except ValueError as error:
        return str(error)
