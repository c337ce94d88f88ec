"""Constrained sequences in the engine: the same output whoever makes it, and the right ends."""

import json
from collections.abc import Sequence
from functools import cache

import msgspec
import pytest
from llguidance import LLTokenizer

from tests.support.engine_requests import engine_config, handed_over, make_request, run_until_idle, tokens_of
from tests.support.fake_runner import FakeRunner
from tests.support.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from twostroke.engine.constraint_compiler import ConstraintCompiler
from twostroke.engine.engine import Engine
from twostroke.engine.interfaces import SampledToken, SequenceSlice
from twostroke.protocol.constraint import Constraint, ConstraintKind
from twostroke.protocol.errors import ErrorKind, InvalidRequestError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import Role

EOS = 0
PROMPT = list(range(5, 16))
SCHEMA = {
    "type": "object",
    "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
    "required": ["flags"],
    "additionalProperties": False,
}
JSON = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
TOKENIZER = tiny_tokenizer()


@cache
def compiler() -> ConstraintCompiler:
    """One for all tests of this module."""
    tokenizer = LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    return ConstraintCompiler(tokenizer, VOCAB_SIZE)


def make_engine(role: Role = Role.AGGREGATED, num_blocks: int = 64) -> tuple[Engine, FakeRunner]:
    """An engine over an instant runner with the tiny vocabulary."""
    runner = FakeRunner(num_blocks=num_blocks, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    return Engine(runner, engine_config(max_batched_tokens=64), role), runner


def constrained(request: GenerationRequest, constraint: Constraint = JSON) -> GenerationRequest:
    """`request` with a constraint."""
    return msgspec.structs.replace(request, constraint=constraint)


def add(engine: Engine, request: GenerationRequest) -> None:
    """As a worker does: the engine gets the constraint compiled, and advanced by the output so far."""
    assert request.constraint is not None
    engine.add(request, compiler().start(request.constraint, unpack_tokens(request.generated_ids)).result(10))


def output_of(*requests: GenerationRequest, num_blocks: int = 64) -> dict[int, list[SequenceOutput]]:
    """All outputs of one engine that runs `requests` together."""
    engine, _ = make_engine(num_blocks=num_blocks)
    for request in requests:
        add(engine, request)
    outputs = run_until_idle(engine)
    if num_blocks < 64:
        assert engine.load().counters.preemptions > 0
    return outputs


def request(client_id: int = 1, generated: Sequence[int] = ()) -> GenerationRequest:
    """A constrained request."""
    return constrained(make_request(client_id, PROMPT, generated=generated, max_tokens=200))


def test_the_output_is_what_the_schema_says_and_then_ends() -> None:
    """Whatever the model would have chosen; the last token completes the JSON, with no end token after it."""
    outputs = output_of(request())[1]
    tokens = tokens_of(outputs)
    flags = json.loads(TOKENIZER.decode(tokens))["flags"]
    assert 2 <= len(flags) <= 4
    assert all(isinstance(flag, bool) for flag in flags)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id is None
    assert TOKENIZER.decode(tokens[-1:]).endswith("}")


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    """With a cache too small for all, tokens are those of a sequence alone."""
    alone = tokens_of(output_of(request())[1])
    outputs = output_of(*(request(client_id) for client_id in range(1, 7)), num_blocks=54)
    assert [tokens_of(outputs[client_id]) for client_id in range(1, 7)] == [alone] * 6


@pytest.mark.parametrize("made", [1, 2, 7])
def test_a_worker_that_resumes_replays_what_others_made(made: int) -> None:
    """The tokens before and after together are those of one worker."""
    whole = tokens_of(output_of(request())[1])
    resumed = output_of(request(generated=whole[:made]))[1]
    assert whole[:made] + tokens_of(resumed, offset=made) == whole


def test_a_hand_over_changes_nothing() -> None:
    """The generation worker has the grammar from the request, and the first token from the hand-over."""
    whole = tokens_of(output_of(request())[1])
    context, context_runner = make_engine(Role.CONTEXT)
    first_request = constrained(make_request(1, PROMPT, phase=Phase.CONTEXT_ONLY, max_tokens=200))
    add(context, first_request)
    context.step()
    [handover] = context.take_handovers()
    first = unpack_tokens(handover.output.token_ids)
    generation, generation_runner = make_engine(Role.GENERATION)
    add(generation, constrained(handed_over(first_request, first, len(handover.blocks))))
    generation.step()
    [reservation] = generation.take_reservations()
    source = [handover.blocks[position] for position in reservation.positions]
    generation_runner.copy_blocks_from(context_runner, source, reservation.blocks)
    assert generation.adopt(reservation.key)
    assert first + tokens_of(run_until_idle(generation)[1], offset=1) == whole


def test_a_first_token_that_completes_the_output_is_not_handed_over() -> None:
    """As with an end token: the context worker ends the request."""
    context, _ = make_engine(Role.CONTEXT)
    one = constrained(make_request(1, PROMPT, phase=Phase.CONTEXT_ONLY), Constraint(ConstraintKind.REGEX, "[ab]"))
    add(context, one)
    [output] = context.step()
    assert output.finish_reason is FinishReason.STOP
    assert not context.take_handovers()
    assert TOKENIZER.decode(unpack_tokens(output.token_ids)) in {"a", "b"}


def test_each_of_several_sequences_follows_the_grammar_by_itself() -> None:
    """Their first tokens come from one place in it; then each goes its own way, as it would alone."""
    engine, _ = make_engine()
    several = msgspec.structs.replace(request(), n=3)
    add(engine, several)
    outputs = run_until_idle(engine)[1]
    for one in several.sequences():
        mine = [output for output in outputs if output.key == one.key]
        alone = output_of(one)[1]
        assert tokens_of(mine) == tokens_of(alone)
        assert "flags" in json.loads(TOKENIZER.decode(tokens_of(mine)))


def test_max_tokens_may_cut_it_off() -> None:
    """Then the reason is the length; unless the last token that was allowed completes it."""
    whole = tokens_of(output_of(request())[1])
    for limit, reason in ((len(whole) - 1, FinishReason.LENGTH), (len(whole), FinishReason.STOP)):
        cut = output_of(constrained(make_request(1, PROMPT, max_tokens=limit)))[1]
        assert tokens_of(cut) == whole[:limit]
        assert cut[-1].finish_reason is reason


def test_others_in_the_batch_are_not_touched() -> None:
    """The same tokens beside a constrained sequence as alone."""
    free = make_request(2, PROMPT, max_tokens=12, ignore_eos=True)
    engine, _ = make_engine()
    engine.add(free)
    alone = tokens_of(run_until_idle(engine)[2])
    engine, _ = make_engine()
    add(engine, request())
    engine.add(free)
    assert tokens_of(run_until_idle(engine)[2]) == alone


class Unmasked(FakeRunner):
    """Always chooses token 0, as a sampler does that has no token left."""

    def choose(self, part: SequenceSlice, tag: int) -> SampledToken:
        """See `FakeRunner.choose`."""
        del tag
        return SampledToken(part.request_id, 0, None)


def test_no_token_left_ends_that_request_alone() -> None:
    """Where other parameters forbid all that the grammar allows, token 0 comes: an error of that request."""
    engine = Engine(Unmasked(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)), engine_config(), Role.AGGREGATED)
    add(engine, constrained(make_request(1, PROMPT, max_tokens=9), Constraint(ConstraintKind.REGEX, "aa")))
    engine.add(make_request(2, PROMPT, max_tokens=3, ignore_eos=True))
    outputs = run_until_idle(engine)
    [broken] = outputs[1]
    assert broken.error is not None
    assert broken.error.kind is ErrorKind.INVALID
    assert "cannot follow its grammar" in broken.error.message
    assert broken.offset == 0
    assert tokens_of(outputs[2]) == [0, 0, 0]


def test_a_constraint_and_its_compiled_form_go_together() -> None:
    """A caller that forgot one of both is told."""
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="compiled constraint"):
        engine.add(request())
