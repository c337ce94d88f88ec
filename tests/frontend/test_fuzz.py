"""Whatever is sent: an answer in time, in the form that the OpenAPI document describes, and never a 5xx."""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from schemathesis import APIOperation
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.applications import Starlette

from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS, tiny_tokenizer
from twostroke.frontend import openapi
from twostroke.frontend.app import FrontendOptions, create_app
from twostroke.frontend.chat_template import ChatTemplate
from twostroke.frontend.http_server import Site, bind, serve, url_of
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

AnyOperation = APIOperation[Any, Any, Any, Any]
AnyCase = schemathesis.Case[AnyOperation]
SEED = random.randrange(1 << 32)
"""Printed with a failure; write it here to see the failure again."""
ANSWER_S = 5.0
OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(msgspec.json.decode(openapi.document())).get_all_operations()
    if isinstance(found, Ok)
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
SMALL_SCRIPT = Script(steps=[(40,), (41,), (0,)], stop_token_id=0)


def make_app() -> Starlette:
    """An application that answers at once."""
    text = TextModel(tiny_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {"eos_token": EOS}))
    options = FrontendOptions(allow_chat_template=True)
    return create_app(FakeExecutor(SMALL_SCRIPT), text, options, CollectorRegistry())


class ServerThread:
    """A real server over the fake executor, on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._socket = bind("127.0.0.1", 0)
        self.url = url_of(self._socket)
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._started.wait(ANSWER_S)

    async def _serve(self) -> None:
        await serve([Site(make_app(), self._socket)], stop=self._stop, grace_s=0.2, on_started=self._started.set)

    def close(self) -> None:
        """Stop and wait."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(ANSWER_S)
        self._loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a real server."""
    thread = ServerThread()
    yield thread.url
    thread.close()


@pytest.fixture(scope="module")
def application() -> Starlette:
    """The same application without a server."""
    return make_app()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_the_server_does_what_its_document_says(server: str, operation: AnyOperation) -> None:
    """Requests made from the document, right and wrong ones, against a real server."""

    @seed(SEED)
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def conforms(case: AnyCase) -> None:
        response = case.call(base_url=server, timeout=ANSWER_S)
        case.validate_response(response, checks=CHECKS)

    print(f"fuzz seed: {SEED}")
    conforms()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, object]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}


@pytest.mark.parametrize("path", sorted(_BODIES))
@seed(SEED)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_values_of_every_field_never_break_the_server(
    application: Starlette, path: str, data: st.DataObject
) -> None:
    """A few fields of a right request hold anything: each answer is a 200, or a 4xx in the error form."""
    body, right = _BODIES[path]
    names = st.sampled_from([field.name for field in msgspec.structs.fields(body)])
    fields = {**right, **data.draw(st.dictionaries(names, _JSON, max_size=3))}
    check(application, path, msgspec.json.encode(fields))


@pytest.mark.parametrize("path", sorted(_BODIES))
@seed(SEED)
@settings(max_examples=60, deadline=None)
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | _JSON.map(msgspec.json.encode))
def test_random_bodies_never_break_the_server(application: Starlette, path: str, body: bytes) -> None:
    """Bytes that are no JSON, and JSON that is no request."""
    check(application, path, body)


@pytest.mark.parametrize("path", sorted(_BODIES))
@pytest.mark.parametrize(
    "text", [r"\ud800", r"\udc00\ud800", r"\u0000", r"\uffff", "<|im_start|>", "￿", r"\ud83d\ude00"]
)
def test_odd_characters_never_break_the_server(application: Starlette, path: str, text: str) -> None:
    """Half surrogates, which JSON can spell and UTF-8 cannot; NUL; special tokens in a text."""
    bodies = {
        "/v1/completions": '{"prompt": "%s", "stop": "%s", "cache_salt": "%s", "user": "%s"}',
        "/v1/chat/completions": '{"messages": [{"role": "%s", "content": "%s", "name": "%s"}], "cache_salt": "%s"}',
        "/tokenize": '{"prompt": "%s", "model": "tiny", "x%s": "%s%s"}',
        "/detokenize": '{"tokens": [5], "x%s": "%s", "y": "%s%s"}',
    }
    check(application, path, (bodies[path] % ((text,) * 4)).encode())


def check(application: Starlette, path: str, body: bytes) -> None:
    """Send `body` to an application and look at its answer."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            async with asyncio.timeout(ANSWER_S):
                return await client.post(path, content=body)

    answer = asyncio.run(send())
    assert answer.status_code in {200, 400, 404, 413}, (SEED, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
