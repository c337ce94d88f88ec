"""`/tokenize` and `/detokenize`, with vLLM's schema."""

import httpx
import pytest

from tests.frontend.conftest import MakeApp
from tests.support.tiny_tokenizer import tiny_tokenizer
from twostroke.frontend.auth import ApiKeys

TOKENIZER = tiny_tokenizer()
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_text_becomes_tokens_and_comes_back(http: httpx.AsyncClient) -> None:
    """All characters, special tokens included."""
    text = "été 日本語 😀<|im_end|>"
    answer = (await http.post("/tokenize", json={"prompt": text, "model": "tiny"})).json()
    ids = TOKENIZER.encode(text).ids
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    back = await http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}


async def test_tokens_are_named_if_asked_for(http: httpx.AsyncClient) -> None:
    """As the vocabulary spells them."""
    answer = (await http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True})).json()
    assert answer["token_strs"] == [TOKENIZER.id_to_token(token) for token in answer["tokens"]]
    assert answer["token_strs"] == ["a", "Ġ", "b"]


async def test_a_conversation_is_rendered_first(http: httpx.AsyncClient) -> None:
    """The same prompt that the chat endpoint would make."""
    answer = (await http.post("/tokenize", json=CHAT)).json()
    assert answer["tokens"] == TOKENIZER.encode(RENDERED).ids
    short = (await http.post("/tokenize", json={**CHAT, "add_generation_prompt": False})).json()
    assert short["tokens"] == TOKENIZER.encode(RENDERED.removesuffix("<|im_start|>assistant\n")).ids


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 320]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, fields: dict[str, object], param: str
) -> None:
    """A 400 in the form of every other error."""
    answer = await http.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_bounds_and_keys_hold_here_too(make_app: MakeApp) -> None:
    """Tokenizing costs time: a key is needed, long bodies and other models are refused."""
    transport = httpx.ASGITransport(make_app(max_body_bytes=100, api_keys=ApiKeys(["key"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        key = {"authorization": "Bearer key"}
        statuses = [
            (await client.post("/tokenize", json={"prompt": "x"})).status_code,
            (await client.post("/detokenize", json={"tokens": [1]})).status_code,
            (await client.post("/tokenize", json={"prompt": "x" * 100}, headers=key)).status_code,
            (await client.post("/tokenize", json={"prompt": "x", "model": "other"}, headers=key)).status_code,
            (await client.post("/tokenize", json={"prompt": "x"}, headers=key)).status_code,
        ]
    assert statuses == [401, 401, 413, 404, 200]
