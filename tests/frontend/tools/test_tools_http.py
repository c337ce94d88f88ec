"""Tools and structured output over HTTP, as the `openai` client and others use them, with scripted models."""

import json
from collections.abc import Iterable

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletionToolParam
from prometheus_client import CollectorRegistry

from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import EOS, tiny_tokenizer
from twostroke.executor.base import ServedModel
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.chat_template import ChatTemplate
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.config import ToolFamily
from twostroke.protocol.constraint import ConstraintKind

TOKENIZER = tiny_tokenizer()
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "Weather?"}]}
LLAMA_TEMPLATE = (
    '{% if tools %}{{ \'{"name": function name, "parameters": ...}\' }}{% for tool in tools %}{{ tool | tojson }}'
    "{% endfor %}{% endif %}{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)


@pytest.fixture(autouse=True)
def _long_context(executor: FakeExecutor) -> None:
    """Tools take room in a prompt."""
    executor.served = ServedModel("tiny", max_model_len=4096, vocab_size=320, eos_token_ids=(0,))


def tokens_of(text: str, size: int = 1) -> list[list[int]]:
    """A script's steps that say `text`."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def says(executor: FakeExecutor, text: str, size: int = 1) -> None:
    """Let the model answer `text`, some tokens a step."""
    executor.script = Script(steps=tokens_of(text, size))


async def test_a_call_is_an_answer_of_its_own_kind(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Not streamed: name, arguments, no content, and the reason says so."""
    says(executor, CALL)
    answer = await openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert call.id.startswith("call_")


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_streamed_calls_add_up_to_the_whole_ones(openai: AsyncOpenAI, executor: FakeExecutor, size: int) -> None:
    """The client joins the deltas; none shows anything of the model's syntax, whatever the steps' sizes."""
    says(executor, "I look. " + CALL + "\n" + CALL, size)
    content, reasons = "", list[str | None]()
    calls: dict[int, tuple[str, str]] = {}
    stream = await openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER], stream=True
    )
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert delta.index not in calls
                calls[delta.index] = (delta.function.name or "", "")
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + (delta.function.arguments or ""))
    assert content == "I look."
    assert calls == {0: ("weather", '{"city": "Paris"}'), 1: ("weather", '{"city": "Paris"}')}
    assert reasons[-1] == "tool_calls"
    assert not any(reasons[:-1])


async def test_one_call_is_enough_where_the_client_says_so(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """`parallel_tool_calls` of false drops the others."""
    says(executor, CALL + CALL)
    body = {**CHAT, "tools": [WEATHER], "parallel_tool_calls": False}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_a_call_that_is_cut_off_ends_for_its_length(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """What there is of it is given; the reason stays `length`."""
    says(executor, CALL)
    body = {**CHAT, "tools": [WEATHER], "max_tokens": len(tokens_of(CALL.partition("Paris")[0]))}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


async def test_without_tools_the_same_text_is_words(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """So it is with `tool_choice` of none."""
    says(executor, CALL)
    without: list[dict[str, object]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}]
    for fields in without:
        choice = (await http.post("/v1/chat/completions", json={**CHAT, **fields})).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def prompt_of(http: httpx.AsyncClient, executor: FakeExecutor, **fields: object) -> str:
    """The prompt that a chat becomes."""
    answer = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    prompt_ids: list[int] = memoryview(executor.calls.requests[-1].prompt_ids).cast("i").tolist()
    return TOKENIZER.decode(prompt_ids, skip_special_tokens=False)


async def test_a_template_that_knows_no_tools_gets_them_as_text(
    http: httpx.AsyncClient, executor: FakeExecutor
) -> None:
    """In the system message; calls and results of earlier turns are text of the assistant and the user."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    prompt = await prompt_of(http, executor, messages=messages, tools=[WEATHER])
    assert "<|im_start|>system\nBe brief.\n\n# Tools" in prompt
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt


async def test_a_template_that_knows_tools_renders_them_itself(executor: FakeExecutor) -> None:
    """With arguments as an object; and its own words tell the family: here Llama's, whose calls are bare JSON."""
    text = TextModel(TOKENIZER, ChatTemplate(LLAMA_TEMPLATE, {"eos_token": EOS}))
    app = create_app(executor, text, FrontendOptions(), CollectorRegistry())
    says(executor, '{"name": "weather", "parameters": {"city": "Oslo"}}')
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as http:
        prompt = await prompt_of(http, executor, messages=messages, tools=[WEATHER])
        assert json.dumps(WEATHER) in prompt
        assert 'assistant: {"city": "Rome"}\n' in prompt
        body = {**CHAT, "tools": [WEATHER], "tool_choice": "required"}
        [said] = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["tool_calls"]
    assert said["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    constraint = executor.calls.requests[-1].constraint
    assert constraint is not None
    assert r"{\"name\": \"weather\", \"parameters\": " in constraint.text


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
            ConstraintKind.JSON_SCHEMA,
            '{"type": "integer"}',
        ),
        ({"guided_json": '{"type": "null"}'}, ConstraintKind.JSON_SCHEMA, '{"type": "null"}'),
        ({"guided_regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"guided_choice": ['yes "é"', "no"]}, ConstraintKind.LARK, 'start: "yes \\"é\\"" | "no"'),
        ({"guided_grammar": 'start: "a"'}, ConstraintKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"regex": "b"}}, ConstraintKind.REGEX, "b"),
    ],
)
async def test_constraints_go_with_the_request(
    http: httpx.AsyncClient,
    executor: FakeExecutor,
    fields: dict[str, object],
    kind: ConstraintKind | None,
    expected: str,
) -> None:
    """In every spelling, on both endpoints."""
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        answer = await http.post(f"/v1/{path}", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        constraint = executor.calls.requests[-1].constraint
        assert (constraint and constraint.kind) == kind
        assert (constraint.text if constraint else "") == expected


def _json_format(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


REFUSALS: Iterable[tuple[dict[str, object], str, str]] = [
    (_json_format({"type": "strin"}), "response_format", "Invalid type: strin"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_choice": []}, "guided_choice", "not 0"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "?"}, "guided_grammar", "no GBNF grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "must be none, auto"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice.function.name",
        "`other`",
    ),
    ({"tools": [{"type": "web"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0].type", "web"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "`a b`"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "two tools"),
    ({"tools": [WEATHER], "guided_regex": "a"}, "tools", "answer in JSON"),
    ({"tools": [WEATHER], "tool_choice": "required", **_json_format({})}, "tool_choice", "forces calls"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "Invalid type: x",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSALS)
async def test_what_is_wrong_is_refused_before_anything_runs(
    http: httpx.AsyncClient, executor: FakeExecutor, fields: dict[str, object], param: str, words: str
) -> None:
    """With the field's name, and the library's words where it is a matter of grammar."""
    answer = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not executor.calls.requests


async def test_a_model_of_unknown_syntax_takes_no_tools(executor: FakeExecutor) -> None:
    """Its template renders tools, but says nothing that we know; the option names the syntax."""
    text = TextModel(TOKENIZER, ChatTemplate("[TOOLS]{{ tools }}", {}))
    for options, status in ((FrontendOptions(), 400), (FrontendOptions(tool_family=ToolFamily.HERMES), 200)):
        app = create_app(executor, text, options, CollectorRegistry())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as http:
            answer = await http.post("/v1/chat/completions", json={**CHAT, "tools": [WEATHER]})
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "frontend.tool_family" in answer.json()["error"]["message"]


async def test_the_client_gets_its_own_error(openai: AsyncOpenAI) -> None:
    """A wrong schema is the client library's `BadRequestError`."""
    with pytest.raises(BadRequestError, match="Invalid type"):
        await openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}},
        )
