"""The OpenAI schema: what is read, what is ignored, and how null counts."""

import msgspec
import pytest

from twostroke.protocol.openai import NULL, ChatBody, CompletionBody
from twostroke.protocol.openai_answers import Delta, ErrorBody, ErrorObject, Usage


@pytest.mark.parametrize("prompt", ["x", ["x"], [1, 2], [[1, 2]]])
def test_a_prompt_has_four_forms(prompt: object) -> None:
    """Text, a list of texts, token ids, a list of lists of token ids."""
    body = msgspec.json.decode(msgspec.json.encode({"prompt": prompt}), type=CompletionBody)
    assert body.prompt == prompt


def test_null_means_not_given() -> None:
    """Clients send null for every optional field."""
    names = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    body = msgspec.json.decode(msgspec.json.encode({"prompt": "x", **dict.fromkeys(names)}), type=CompletionBody)
    for name in names:
        value = getattr(body, name)
        assert value is None or bytes(value) == b"null"


def test_unknown_fields_are_ignored_and_unserved_ones_are_kept_raw() -> None:
    """`user` and the like cost nothing; what may have to be refused stays undecoded until then."""
    body = msgspec.json.decode(b'{"messages": [], "user": {"a": 1}, "functions": [1, 2]}', type=ChatBody)
    assert bytes(body.functions) == b"[1, 2]"
    assert body.best_of is NULL


def test_cached_tokens_never_exceed_the_prompt() -> None:
    """Whatever a worker reports."""
    usage = Usage.count(prompt=5, completion=2, cached=8)
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 5)


def test_deltas_leave_out_what_they_do_not_change() -> None:
    """An empty content counts as a change: OpenAI's first chunk has one."""
    assert msgspec.json.encode(Delta(role="assistant", content="")) == b'{"role":"assistant","content":""}'
    assert msgspec.json.encode(Delta()) == b"{}"


def test_errors_always_have_all_four_fields() -> None:
    """Clients read `param` and `code` without looking whether they are there."""
    body = msgspec.json.encode(ErrorBody(ErrorObject("m", "t")))
    assert body == b'{"error":{"message":"m","type":"t","param":null,"code":null}}'
