"""What the text of an output must look like. Crosses with the first message of a request only.

A worker turns a constraint into masks over the vocabulary; every worker that runs a part of the request does so from
the same text and replays the output so far, so that no state of it is ever handed over.
"""

import enum

import msgspec

MAX_CONSTRAINT_CHARS = 256 * 1024


class ConstraintKind(enum.StrEnum):
    """How `Constraint.text` is to be read."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; keywords that the grammar library does not know are refused, never ignored."""
    REGEX = "regex"
    """A regular expression (Rust's syntax) that the whole output matches."""
    LARK = "lark"
    """A context-free grammar in llguidance's dialect of Lark, with a rule `start`."""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """One constraint.

    Attributes:
        kind: How to read `text`.
        text: Schema, expression or grammar.

    Raises:
        ValueError: The text is empty or too long.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.text) <= MAX_CONSTRAINT_CHARS:
            raise ValueError(
                f"constraint must hold 1 to {MAX_CONSTRAINT_CHARS} characters of {self.kind}, not {len(self.text)}"
            )
