"""A model folder's text side, compared with what `transformers` makes of the same folder."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, save_tiny_tokenizer
from twostroke.frontend.chat_template import ChatTemplate, Conversation
from twostroke.frontend.tokenizer import OFFLOAD_CHARS, TextModel
from twostroke.frontend.tokenizer_files import SamplingDefaults
from twostroke.protocol.errors import InvalidRequestError, ModelError

CHAT = [
    {"role": "system", "content": "Be kind & <brief>."},
    {"role": "user", "content": "日本語?"},
    {"role": "assistant", "content": "はい"},
    {"role": "user", "content": "ok"},
]
HELPERS = (
    "{%- for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n"
    "    {% generation %}{{ m | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ eos_token }}{{ strftime_now('%Y') | length }}{{ messages | tojson(indent=2) }}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with the tiny tokenizer."""
    save_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, HELPERS])
@pytest.mark.parametrize("in_own_file", [False, True])
async def test_chats_become_the_ids_that_transformers_makes(folder: Path, template: str, *, in_own_file: bool) -> None:
    """Rendering and encoding, with the template in either place and with all the helpers that templates use."""
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["chat_template"] = None if in_own_file else template
    config_file.write_text(json.dumps(config))
    if in_own_file:
        (folder / "chat_template.jinja").write_text(template)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert await TextModel.load(folder).encode_chat(Conversation(CHAT)) == expected


async def test_long_texts_are_encoded_in_a_thread_to_the_same_ids(folder: Path) -> None:
    """The result does not depend on where it was made."""
    text = TextModel.load(folder)
    long = "The quick brown fox. " * (OFFLOAD_CHARS // 20)
    assert len(long) > OFFLOAD_CHARS
    assert await text.encode_text(long) == AutoTokenizer.from_pretrained(folder)(long)["input_ids"]


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message says what is missing."""
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TextModel.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        TextModel.load(tmp_path)


def test_sampling_defaults_come_from_the_model(folder: Path) -> None:
    """`generation_config.json`, where there is one; nulls in it mean nothing."""
    assert TextModel.load(folder).defaults == SamplingDefaults(1.0, 1.0, 0)
    file = folder / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": [1, 2]}')
    assert TextModel.load(folder).defaults == SamplingDefaults(0.6, 1.0, 20)
    file.write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read: .*temperature"):
        TextModel.load(folder)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, words: str) -> None:
    """Its own words reach the client; the sandbox keeps it from Python's internals and from changing the messages."""
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ChatTemplate(template, {}).render(Conversation([{"role": "user", "content": "x"}]))
    assert caught.value.param == "messages"


def test_a_template_that_is_no_jinja_is_the_models_error() -> None:
    """Found at start, not at the first request."""
    with pytest.raises(ModelError, match="chat template is not valid"):
        ChatTemplate("{% if %}", {})


def test_token_bytes_rebuild_every_text(folder: Path) -> None:
    """Byte-level stand-ins back to bytes, one token at a time; special tokens are spelled out."""
    text = TextModel.load(folder)
    sample = "é日😀 \n\x00 ~ÿ"
    assert b"".join(map(text.token_bytes, text.encode(sample, add_special_tokens=False))) == sample.encode()
    assert (text.token_bytes(0), text.token_bytes(10_000)) == (b"<|endoftext|>", b"")
