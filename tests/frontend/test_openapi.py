"""The OpenAPI document says what the server does."""

from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
from starlette.routing import Route

from tests.frontend.conftest import MakeApp
from tests.support.fake_executor import FakeExecutor, Script
from twostroke.frontend import openapi
from twostroke.protocol.openai import INTERNAL, REFUSED


def served() -> dict[str, Any]:
    """The document."""
    document = msgspec.json.decode(openapi.document())
    assert isinstance(document, dict)
    return document


def test_every_route_is_described_and_nothing_else(make_app: MakeApp) -> None:
    """A new endpoint has to be added to the document, an old one taken from it."""
    routes = {
        (route.path.replace("{name:path}", "{name}"), method.lower())
        for route in make_app().routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in served()["paths"].items() for method in methods} == routes


async def test_it_is_served(http: httpx.AsyncClient) -> None:
    """As JSON, and the same as what is tested here."""
    answer = await http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == served()
    assert answer.json()["openapi"] == "3.1.0"


@pytest.mark.parametrize("body", ["CompletionBody", "ChatBody"])
def test_fields_that_are_refused_are_no_part_of_it(body: str) -> None:
    """Whoever generates a client gets what is served."""
    fields = served()["components"]["schemas"][body]["properties"]
    assert not fields.keys() & (REFUSED.keys() | INTERNAL)
    assert {"model", "max_tokens", "stream", "seed"} <= fields.keys()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/models", None),
        ("/health", None),
    ],
)
async def test_answers_have_the_shape_that_it_describes(
    http: httpx.AsyncClient, executor: FakeExecutor, path: str, fields: dict[str, object] | None
) -> None:
    """Also those that refuse."""
    executor.script = Script(steps=[(40,), (41,)])
    answer = await (http.get(path) if fields is None else http.post(path, json=fields))
    document = served()
    operation = document["paths"][path]["get" if fields is None else "post"]
    content = operation["responses"][str(answer.status_code)]["content"]["application/json"]
    jsonschema_rs.validate({**content["schema"], "components": document["components"]}, answer.json())
