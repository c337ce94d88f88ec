"""Conversations become the prompt that `transformers` makes of them, whatever options a request sets."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from tests.support.fake_executor import FakeExecutor
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS, save_tiny_tokenizer, tiny_tokenizer
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.chat_template import ChatTemplate, Conversation, Message
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.tokens import unpack_tokens

TRIMMING = CHAT_TEMPLATE.replace("message['content']", "(message['content'] | trim)")
DOCUMENTED = (
    "{% if documents %}{% for d in documents %}{{ d.title }}={{ d.text }};{% endfor %}{% endif %}"
    "{% if tools is not none %}tools{% endif %}{{ mood | default('calm') }}:" + CHAT_TEMPLATE
)
ROLES: list[Message] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Call it.", "name": "ann"},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "assistant", "content": "The answer  "},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with the tiny tokenizer."""
    save_tiny_tokenizer(tmp_path)
    return tmp_path


def reference(folder: Path, template: str, messages: Sequence[Message], **options: Any) -> str:
    """What `transformers` renders."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text: object = tokenizer.apply_chat_template(
        list(messages),  # type: ignore[arg-type] # any mapping is taken
        chat_template=template,
        tokenize=False,
        **options,
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMING, DOCUMENTED])
@pytest.mark.parametrize("ending", ["generate", "plain", "continue"])
def test_a_conversation_renders_as_transformers_renders_it(folder: Path, template: str, ending: str) -> None:
    """With the head of the next message, without it, and ended inside the last message, trimmed or not."""
    ours = ChatTemplate(template, {"eos_token": EOS}).render(
        Conversation(
            ROLES,
            add_generation_prompt=ending == "generate",
            continue_final_message=ending == "continue",
            documents=[{"title": "t", "text": "d"}],
            variables={"mood": "glad"},
        )
    )
    assert ours == reference(
        folder,
        template,
        ROLES,
        add_generation_prompt=ending == "generate",
        continue_final_message=ending == "continue",
        documents=[{"title": "t", "text": "d"}],
        mood="glad",
    )


async def prompt_of(http: httpx.AsyncClient, executor: FakeExecutor, **fields: object) -> str:
    """The text of the prompt that a chat request becomes."""
    body = {"messages": ROLES, "max_tokens": 1, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return tiny_tokenizer().decode(unpack_tokens(executor.calls.requests[-1].prompt_ids), skip_special_tokens=False)


async def test_requests_choose_how_the_prompt_ends(
    http: httpx.AsyncClient, executor: FakeExecutor, folder: Path
) -> None:
    """The head of the assistant's message by default; to continue the last message is enough said."""
    for fields, options in (
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": None}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
    ):
        expected = reference(folder, CHAT_TEMPLATE, ROLES, **options)
        assert await prompt_of(http, executor, **fields) == expected


async def test_text_parts_are_joined_by_lines(http: httpx.AsyncClient, executor: FakeExecutor) -> None:
    """Templates of text models expect one string."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = await prompt_of(http, executor, messages=[{"role": "user", "content": parts}])
    assert prompt == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_only_an_assistant_may_say_nothing(http: httpx.AsyncClient, executor: FakeExecutor, role: str) -> None:
    """A message without content is refused by its place, unless it is an assistant's (whose calls may be all)."""
    answer = await http.post("/v1/chat/completions", json={"messages": [{"role": role}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"
    silent = [{"role": "user", "content": "x"}, {"role": "assistant"}, {"role": "user", "content": "y"}]
    assert (await http.post("/v1/chat/completions", json={"messages": silent})).status_code == 200


async def test_a_template_error_is_a_400_in_its_own_words(executor: FakeExecutor) -> None:
    """Roles that do not alternate, for example: the client can put that right."""
    template = "{% if messages | length % 2 == 0 %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    text = TextModel(tiny_tokenizer(), ChatTemplate(template, {}))
    app = create_app(executor, text, FrontendOptions(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        answer = await client.post("/v1/chat/completions", json={"messages": ROLES})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the chat template refuses the messages: roles must alternate"
    assert answer.json()["error"]["param"] == "messages"


async def test_a_request_may_bring_a_template_where_that_is_allowed(executor: FakeExecutor) -> None:
    """Also for a model that has none; one that is no template is the request's fault."""
    options = FrontendOptions(allow_chat_template=True)
    app = create_app(executor, TextModel(tiny_tokenizer()), options, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend") as client:
        own = "{{ messages[0].content }}!"
        assert await prompt_of(client, executor, chat_template=own) == "Be kind.!"
        broken = await client.post("/v1/chat/completions", json={"messages": ROLES, "chat_template": "{% if %}"})
        without = await client.post("/v1/chat/completions", json={"messages": ROLES})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "chat_template")
    assert without.status_code == 400


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    """The prompt would not end where the client thinks."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        template.render(Conversation(ROLES, add_generation_prompt=False, continue_final_message=True))


@pytest.mark.parametrize("program", ["{{ 'a' * 10 ** 12 }}", "{{ range(10 ** 9) }}", "{{ messages[0].update(x=1) }}"])
def test_a_template_that_asks_for_too_much_harms_nobody(program: str) -> None:
    """Memory, endless ranges, changes of its inputs: the sandbox and the last resort make an error of each."""
    with pytest.raises(InvalidRequestError, match="the chat template"):
        ChatTemplate(program, {}).render(Conversation(ROLES))


def test_special_tokens_and_variables_do_not_hide_the_inputs() -> None:
    """Names of a request's variables may be anything; a special token can be overridden, messages cannot."""
    template = ChatTemplate("{{ eos_token }}{{ self_ }}{{ messages | length }}", {"eos_token": "a", "messages": "b"})
    names = itertools.chain(("eos_token", "c"), ("self_", "d"), ("messages", "e"))
    variables = dict(zip(names, names, strict=True))
    assert template.render(Conversation(ROLES, variables=variables)) == "cd4"
