"""Masks and matchers: what may come next in an output, and where it ends."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.fake_runner import FakeRunner
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.constraint_compiler import ConstraintCompiler, outcome_of
from twostroke.protocol.constraint import MAX_CONSTRAINT_CHARS, Constraint, ConstraintKind
from twostroke.protocol.errors import InvalidRequestError, ModelError
from twostroke.protocol.grammar import MAX_SPACES, grammar_error

EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 22, 333]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> ConstraintCompiler:
    """A compiler for the tiny vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return ConstraintCompiler.load(folder, FakeRunner(vocab_size=VOCAB_SIZE).facts)


def regex(text: str) -> Constraint:
    """The whole output matches `text`."""
    return Constraint(ConstraintKind.REGEX, text)


def schema(value: object) -> Constraint:
    """The output is JSON that is valid under `value`."""
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def started(compiler: ConstraintCompiler, constraint: Constraint, output: Sequence[int] = ()) -> TokenConstraint:
    """A constraint at its place after `output`."""
    return compiler.start(constraint, output).result(10)


def ids_of(text: str) -> list[int]:
    """Tokens of a text."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def allowed(constraint: TokenConstraint) -> list[str]:
    """Spelling of the tokens that may come next."""
    mask = constraint.mask()
    assert mask.shape == (VOCAB_SIZE,)
    assert mask.dtype == np.bool_
    return [str(TOKENIZER.id_to_token(int(token_id))) for token_id in np.flatnonzero(mask)]


def test_only_what_goes_on_as_the_grammar_says_may_come(compiler: ConstraintCompiler) -> None:
    """The mask follows the output; the end may come only where the expression is satisfied, and finishes it."""
    constraint = started(compiler, regex("cx*Q?"))
    assert allowed(constraint) == ["c"]
    constraint.advance(ids_of("c"))
    assert allowed(constraint) == ["<|endoftext|>", "Q", "x"]
    assert not constraint.finished
    constraint.advance(ids_of("Q"))
    assert constraint.finished, "nothing can follow Q"


def test_an_end_of_sequence_token_finishes_a_satisfied_grammar(compiler: ConstraintCompiler) -> None:
    """Although more could have come."""
    constraint = started(compiler, regex("a+"), ids_of("a"))
    constraint.advance([EOS])
    assert constraint.finished


def test_a_token_that_the_grammar_forbids_is_an_error_of_the_request(compiler: ConstraintCompiler) -> None:
    """As when all allowed tokens were forbidden by other parameters; the constraint is of no use afterwards."""
    constraint = started(compiler, regex("ab"))
    with pytest.raises(InvalidRequestError, match="cannot follow its grammar"):
        constraint.advance(ids_of("z"))
    assert not constraint.finished
    assert allowed(constraint) == ["<|endoftext|>"], "asking a broken one is no crash of the engine"
    with pytest.raises(InvalidRequestError, match="cannot follow its grammar"):
        constraint.advance([EOS])


def test_copies_go_their_own_ways(compiler: ConstraintCompiler) -> None:
    """Each sequence of a request has its own."""
    first = started(compiler, regex("a[bc]d"), ids_of("a"))
    second = first.copy()
    first.advance(ids_of("b"))
    assert allowed(first) == ["d"]
    assert allowed(second) == ["b", "c"]


def test_a_worker_that_takes_over_is_at_the_same_place(compiler: ConstraintCompiler) -> None:
    """However an output is divided between workers, the masks are those of one worker."""
    seed = 11
    print(f"seed {seed}")
    draw = random.Random(seed)
    constraint = started(compiler, schema(SCHEMA))
    output: list[int] = []
    while not constraint.finished:
        mask = constraint.mask()
        assert (started(compiler, schema(SCHEMA), output).mask() == mask).all(), output
        output.append(draw.choice(np.flatnonzero(mask).tolist()))
        constraint.advance(output[-1:])
    value = json.loads(TOKENIZER.decode(output))
    assert set(value) == {"ok", "size"}
    assert value["size"] in {1, 22, 333}


def test_output_that_the_grammar_does_not_allow_is_refused_at_once(compiler: ConstraintCompiler) -> None:
    """A request that resumes with other text than it could have made."""
    outcome = outcome_of(compiler.start(regex("ab"), ids_of("b")))
    assert isinstance(outcome, InvalidRequestError)
    assert outcome.param == "constraint"


def test_json_has_little_white_space(compiler: ConstraintCompiler) -> None:
    """Enough to indent, not enough to fill a context."""
    started(compiler, schema(SCHEMA), ids_of("{\n" + " " * 8 + '"ok":'))
    wide = outcome_of(compiler.start(schema(SCHEMA), ids_of("{" + " " * (MAX_SPACES + 1) + '"ok":')))
    assert isinstance(wide, InvalidRequestError)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (regex("((("), "unclosed group"),
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"type": "object", "propertyNames": {"pattern": "a"}}), "propertyNames"),
        (Constraint(ConstraintKind.LARK, "start: missing"), "unknown name"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[1"), "column"),
    ],
)
def test_wrong_constraints_are_refused(compiler: ConstraintCompiler, constraint: Constraint, reason: str) -> None:
    """By frontends, without a vocabulary, and by workers alike; the message says what is wrong."""
    assert reason in str(grammar_error(constraint))
    outcome = outcome_of(compiler.start(constraint, ()))
    assert isinstance(outcome, InvalidRequestError)
    assert reason in str(outcome)


def test_right_constraints_have_no_error() -> None:
    """Nothing is refused that a worker would take."""
    assert grammar_error(schema(SCHEMA)) is None
    assert grammar_error(regex("a+")) is None


def test_sizes_are_bounded() -> None:
    """A constraint is never empty or huge."""
    with pytest.raises(ValueError, match="characters of regex, not 0"):
        regex("")
    with pytest.raises(ValueError, match=str(MAX_CONSTRAINT_CHARS)):
        regex("a" * (MAX_CONSTRAINT_CHARS + 1))


def test_a_vocabulary_that_does_not_go_with_the_model_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """More tokens than logits, or no tokenizer at all."""
    folder = tmp_path_factory.mktemp("other")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        ConstraintCompiler.load(folder, FakeRunner().facts)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="vocab size too small"):
        ConstraintCompiler.load(folder, FakeRunner(vocab_size=VOCAB_SIZE - 1).facts)
