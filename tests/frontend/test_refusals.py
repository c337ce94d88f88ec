"""Whatever is wrong with a request: one status, one JSON body, the field at fault."""

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import tiny_tokenizer
from twostroke.executor.base import Health, HealthState, ServedModel
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import EngineDeadError, InternalRequestError
from twostroke.protocol.openai import INTERNAL, NEVER_SERVED, REFUSED, NotServed

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(answer: httpx.Response) -> dict[str, object]:
    """The error's content; every error has exactly this form."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, object] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": 7}, "prompt", "Expected `str | array`, got `int`"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "Expected `int | null`, got `str`"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1, not 0"),
        ({"prompt": "x", "temperature": -1}, "temperature", "from 0 to 100, not -1.0"),
        ({"prompt": "x", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "x", "top_k": -2}, "top_k", "at least 0"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "from 0 to 20, not 21"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "at most max_tokens (16), not 17"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop", "1 to 512 characters, not 0"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 texts, not 17"),
        ({"prompt": "x", "stop": [1]}, "stop[0]", "Expected `str`, got `int`"),
        ({"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids", "token id 320 is not in the vocabulary"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "Expected `bool"),
        ({"prompt": []}, "prompt", "at least one token, not 0"),
        ({"prompt": ""}, "prompt", "at least one token, not 0"),
        ({"prompt": [1, 320]}, "prompt", "token id 320 is not in the vocabulary of 0 to 319"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [1, "x"]}, "prompt", "must hold one kind"),
        ({"prompt": ["x", [1]]}, "prompt", "must hold one kind"),
        ({"prompt": ["x", ""]}, "prompt[1]", "at least one token, not 0"),
        ({"prompt": [[1], []]}, "prompt[1]", "at least one token, not 0"),
        ({"prompt": [[1], [2, 400]]}, "prompt[1]", "token id 400"),
        ({"prompt": [[1], [2, None]]}, "prompt[1][1]", "Expected `int`, got `null`"),
        ({"prompt": ["x"] * 1025}, "prompt", "at most 1024 prompts, not 1025"),
        ({"prompt": [[1], [1] * 256]}, "prompt[1]", "256 tokens leaves no room"),
        ({}, "prompt", "missing required field"),
        ({"prompt": [1] * 256}, "prompt", "256 tokens leaves no room for output: the model's context holds 256"),
        ({"prompt": [1] * 250, "max_tokens": 7}, "max_tokens", "7 and the prompt of 250 tokens do not fit"),
    ],
)
async def test_a_wrong_completion_is_a_400_that_names_its_field(
    http: httpx.AsyncClient, fields: dict[str, object], param: str, words: str
) -> None:
    """The message says the value and what would be right; nothing reaches the executor."""
    answer = await http.post("/v1/completions", json=fields)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "messages", "missing required field"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing required field `role`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "not `image_url`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].type",
            "missing",
        ),
        (
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({**CHAT, "continue_final_message": 1}, "continue_final_message", "Expected `bool | null`"),
        ({**CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "the model's own template only"),
        ({**CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs", "Expected `object | null`"),
        ({**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "from the request"),
        ({**CHAT, "documents": ["text"]}, "documents[0]", "Expected `object`"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({**CHAT, "logprobs": 2}, "logprobs", "Expected `bool | null`"),
        ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({**CHAT, "max_completion_tokens": 1000}, "max_completion_tokens", "1000 and the prompt of"),
    ],
)
async def test_a_wrong_chat_is_a_400_that_names_its_field(
    http: httpx.AsyncClient, fields: dict[str, object], param: str, words: str
) -> None:
    """Likewise for chats, down to the part of the message."""
    answer = await http.post("/v1/chat/completions", json=fields)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in str(error["message"])


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_what_is_not_served_yet_is_refused_unless_it_asks_for_nothing(
    http: httpx.AsyncClient, executor: FakeExecutor, name: str
) -> None:
    """Ignoring such a field would give another answer than the client asked for."""
    refused = await http.post("/v1/completions", json={"prompt": "x", name: "certainly something"})
    assert refused.status_code == 400
    reason = NEVER_SERVED.get(name, "not supported yet; leave it out")
    assert error_of(refused)["message"] == f"{name} is {reason}"
    assert error_of(refused)["param"] == name
    harmless = [None, *REFUSED[name]]
    for value in harmless:
        assert (await http.post("/v1/completions", json={"prompt": "x", name: value})).status_code == 200
    assert len(executor.calls.requests) == len(harmless)


@pytest.mark.parametrize("name", sorted(INTERNAL))
async def test_the_clusters_own_parameters_are_refused(http: httpx.AsyncClient, name: str) -> None:
    """Nobody outside may claim another request's KV cache."""
    answer = await http.post("/v1/completions", json={"prompt": "x", name: {"handle": 1}})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


def test_every_refused_field_is_declared() -> None:
    """A field that the table lists but no struct declares would be ignored silently."""
    assert set(NotServed.__struct_fields__) == set(REFUSED) | INTERNAL


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": "\xff"}', b"[" * 100_000, b'"x"'])
async def test_what_is_no_json_object_is_a_400(http: httpx.AsyncClient, body: bytes) -> None:
    """Not a 422, not a 500, and no HTML."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = await http.post(path, content=body)
        assert answer.status_code == 400
        error_of(answer)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "logprobs", "stream", "n", "prompt", "model")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
async def test_random_values_never_break_the_server(http: httpx.AsyncClient, fields: dict[str, object]) -> None:
    """Each answer is a 200, or a 400 or 404 in the error form."""
    answer = await http.post("/v1/completions", content=msgspec.json.encode({"prompt": "x", **fields}))
    assert answer.status_code in {200, 400, 404}
    if answer.status_code != 200:
        error_of(answer)


async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient) -> None:
    """The message names the model that is served."""
    answer = await http.post("/v1/completions", json={"prompt": "x", "model": "other"})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "the served model is `tiny`" in str(error["message"])


async def test_unknown_paths_and_methods_have_the_error_form(http: httpx.AsyncClient) -> None:
    """Also what the routing refuses."""
    missing, wrong = await http.get("/v2/nothing"), await http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "/v2/nothing" in str(error_of(missing)["message"])
    error_of(wrong)


async def test_an_unexpected_error_is_a_500_that_tells_nothing(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """A bug's words belong in the log: they may hold anything."""
    executor.script = Script(refusal=RuntimeError("secret detail"))  # type: ignore[arg-type] # a bug, not a planned error
    answer = await http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    error_of(answer)


async def test_a_failed_request_is_a_500_in_its_own_words(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """`InternalRequestError` was raised on purpose, so its message helps."""
    executor.script = Script(error=InternalRequestError("tokens were lost"), steps=[])
    answer = await http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, error_of(answer)["message"]) == (500, "tokens were lost")


async def test_a_loading_or_dead_executor_is_a_503(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """Both say why, and when to come back."""
    executor.health = Health(HealthState.STARTING)
    loading = await http.post("/v1/completions", json={"prompt": "x"})
    executor.health = Health(HealthState.DEAD, "killed by signal 9")
    dead = await http.post("/v1/completions", json={"prompt": "x"})
    assert (loading.status_code, dead.status_code) == (503, 503)
    assert "still loading" in str(error_of(loading)["message"])
    assert error_of(dead)["message"] == "killed by signal 9"
    assert loading.headers["retry-after"] == dead.headers["retry-after"] == "1"
    assert executor.calls.requests == []


async def test_a_worker_that_dies_before_the_first_token_is_a_503(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """Streamed or not, nothing was written yet."""
    executor.script = Script(
        error=EngineDeadError("the worker died"), steps=[]
    )  # the sink gets it as a dead engine does
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert (answer.status_code, error_of(answer)["message"]) == (503, "the worker died")


async def test_a_model_without_chat_template_refuses_chats(executor: FakeExecutor) -> None:
    """The message says where to go instead."""
    app = create_app(executor, TextModel(tiny_tokenizer()), FrontendOptions(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert "use /v1/completions" in str(error_of(answer)["message"])


async def test_a_chat_gets_all_that_the_context_leaves(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """Unlike completions, chats have no default length."""
    executor.served = ServedModel("tiny", max_model_len=100, vocab_size=320, eos_token_ids=(0,))
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    request = executor.calls.requests[0]
    assert request.sampling.max_tokens == 100 - len(request.prompt_ids) // 4
