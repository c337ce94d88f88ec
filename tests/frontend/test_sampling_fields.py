"""Each sampling field reaches the engine as it was meant, or is refused by name."""

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.frontend.test_refusals import error_of
from tests.support.fake_executor import FakeExecutor
from tests.support.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.config import UseDefaults
from twostroke.protocol.errors import ModelError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"logit_bias": {"7": -100, "319": 1.5}}, "logit_bias", ((7, -100.0), (319, 1.5))),
        ({"logit_bias": {}}, "logit_bias", ()),
        ({"stop_token_ids": [5, 319]}, "stop_token_ids", (5, 319)),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
        ({"prompt_logprobs": None}, "prompt_logprobs", None),
        ({"repetition_penalty": None}, "repetition_penalty", 1.0),
    ],
)
async def test_a_field_reaches_the_engine(
    http: httpx.AsyncClient, executor: FakeExecutor, fields: dict[str, object], attribute: str, value: object
) -> None:
    """The same in both endpoints."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        answer = await http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
    assert [getattr(request.sampling, attribute) for request in executor.calls.requests] == [value] * 2


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"min_p": 1.5}, "min_p", "from 0 to 1, not 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100, not 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2, not 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2, not -3.0"),
        ({"logit_bias": {"7": 101}}, "logit_bias", "from -100 to 100, not 101.0 (token id 7)"),
        ({"logit_bias": {"seven": 1}}, "logit_bias", "`seven` is no token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "`-1` is no token id"),
        ({"logit_bias": {"320": 1}}, "logit_bias", "token id 320 is not in the vocabulary of 0 to 319"),
        ({"logit_bias": {"7": "a lot"}}, "logit_bias", "Expected `float`, got `str`"),
        ({"logit_bias": [7]}, "logit_bias", "Expected `object | null`, got `array`"),
        ({"bad_words": [""]}, "bad_words", "1 to 128 characters, not 0"),
        ({"bad_words": ["  "]}, "bad_words", "1 to 128 characters, not 0"),
        ({"bad_words": ["x"] * 129}, "bad_words", "at most 128 texts, not 129"),
        ({"bad_words": "x"}, "bad_words", "Expected `array | null`, got `str`"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20, not -1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "do not go with a stream"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output", "Expected `bool | null`"),
    ],
)
async def test_a_wrong_value_is_a_400_that_names_the_field(
    http: httpx.AsyncClient, executor: FakeExecutor, fields: dict[str, object], param: str, words: str
) -> None:
    """In both endpoints; nothing reaches the engine."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        answer = await http.post(path, json={**body, **fields})
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in str(error["message"])
    assert executor.calls.requests == []


async def test_top_logprobs_out_of_range_are_refused_by_their_own_name(http: httpx.AsyncClient) -> None:
    """Not by that of the engine's field."""
    answer = await http.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 21})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "top_logprobs")


async def test_bad_words_are_forbidden_at_the_start_and_after_a_space(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """Both spellings of a word are token sequences of their own; a given space makes no third."""
    await http.post("/v1/completions", json={"prompt": "x", "bad_words": ["fox", " fox", "Paris"]})
    spelled = [tuple(TOKENIZER.encode(text).ids) for text in ("fox", " fox", "Paris", " Paris")]
    assert executor.calls.requests[0].sampling.bad_words == tuple(spelled)


@pytest.mark.parametrize("use", UseDefaults)
async def test_the_models_generation_config_gives_defaults_unless_ignored(
    executor: FakeExecutor, tmp_path: Path, use: UseDefaults
) -> None:
    """A field that the client sends wins."""
    save_tiny_tokenizer(tmp_path)
    config = '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}'
    (tmp_path / "generation_config.json").write_text(config)
    text = TextModel.load(tmp_path, use)
    app = create_app(executor, text, FrontendOptions(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/completions", json={"prompt": "x", "repetition_penalty": 1, "min_p": 0, "top_k": 0})
    params = [request.sampling for request in executor.calls.requests]
    given = [(one.temperature, one.top_k, one.top_p, one.min_p, one.repetition_penalty) for one in params]
    if use is UseDefaults.AUTO:
        assert given == [(0.6, 20, 0.95, 0.1, 1.05), (0.6, 0, 0.95, 0.0, 1.0)]
    else:
        assert given == [(1.0, 0, 1.0, 0.0, 1.0)] * 2


def test_defaults_out_of_range_are_the_models_fault(tmp_path: Path) -> None:
    """Told at the start, with the file and what to do; no client is blamed later."""
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 0}')
    with pytest.raises(ModelError, match=r"generation_config.json: repetition_penalty must be from 0.01.*ignore"):
        TextModel.load(tmp_path)
    assert TextModel.load(tmp_path, UseDefaults.IGNORE).defaults.repetition_penalty == 1.0
