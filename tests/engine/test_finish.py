"""When a sequence ends, rule by rule."""

import pytest

from tests.support.engine_requests import SamplingFields
from twostroke.engine.finish import Finish, FinishRules
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.sampling import SamplingParams

EOS, STOP, OTHER = 2, 7, 5


@pytest.mark.parametrize(
    ("sampling", "token_id", "output_tokens", "total_tokens", "finish"),
    [
        ({}, OTHER, 1, 11, None),
        ({}, EOS, 1, 11, Finish(FinishReason.STOP, EOS)),
        ({"ignore_eos": True}, EOS, 1, 11, None),
        ({"stop_token_ids": (STOP,)}, STOP, 1, 11, Finish(FinishReason.STOP, STOP)),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, 1, 11, Finish(FinishReason.STOP, EOS)),
        ({}, OTHER, 4, 14, Finish(FinishReason.LENGTH)),
        ({}, EOS, 4, 14, Finish(FinishReason.STOP, EOS)),
        ({}, OTHER, 3, 20, Finish(FinishReason.LENGTH)),
    ],
    ids=["goes on", "eos", "ignored eos", "stop id", "eos as stop id", "max_tokens", "eos at max_tokens", "context"],
)
def test_what_ends_a_sequence(
    sampling: SamplingFields, token_id: int, output_tokens: int, total_tokens: int, finish: Finish | None
) -> None:
    """A token rule wins over a length rule when both apply."""
    rules = FinishRules(SamplingParams(**sampling), (EOS,), max_tokens=4, max_model_len=20)
    assert rules.finish(token_id, output_tokens, total_tokens) == finish


@pytest.mark.parametrize(
    ("sampling", "forbidden"),
    [
        ({"min_tokens": 2}, [(EOS,), (EOS,), ()]),
        ({"min_tokens": 1, "stop_token_ids": (STOP, 1)}, [(1, EOS, STOP), (), ()]),
        ({"min_tokens": 3, "ignore_eos": True}, [(), (), ()]),
        ({}, [(), (), ()]),
    ],
    ids=["eos", "stop ids too", "eos ignored", "no minimum"],
)
def test_ending_ids_are_forbidden_until_min_tokens(sampling: SamplingFields, forbidden: list[tuple[int, ...]]) -> None:
    """At output indices 0, 1 and 2; sorted."""
    rules = FinishRules(SamplingParams(**sampling), (EOS,), max_tokens=9, max_model_len=99)
    assert [rules.forbidden_ids(index) for index in range(3)] == forbidden
