"""A frontend over the fake executor: in process, and behind a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from tests.support.fake_executor import FakeExecutor
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, EOS, tiny_tokenizer
from twostroke.frontend.app import FrontendOptions, create_app, in_flight_of
from twostroke.frontend.chat_template import ChatTemplate
from twostroke.frontend.http_server import Site, bind, serve
from twostroke.frontend.tokenizer import TextModel

MakeApp = Callable[..., Starlette]


@pytest.fixture(scope="session")
def text() -> TextModel:
    """The tiny tokenizer with a chat template."""
    return TextModel(tiny_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {"eos_token": EOS}))


@pytest.fixture
async def executor() -> FakeExecutor:
    """Answers with scripted tokens; the test sets the script."""
    return FakeExecutor()


@pytest.fixture
def make_app(executor: FakeExecutor, text: TextModel) -> MakeApp:
    """Makes an application, with options by name."""

    def make(**options: object) -> Starlette:
        return create_app(executor, text, FrontendOptions(**options), CollectorRegistry())  # type: ignore[arg-type] # options by name

    return make


@pytest.fixture
async def http(make_app: MakeApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without sockets between."""
    transport = httpx.ASGITransport(make_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        yield client


@pytest.fixture
async def url(make_app: MakeApp) -> AsyncIterator[str]:
    """The address of a real server of the application."""
    app = make_app()
    stop, started = asyncio.Event(), asyncio.Event()
    site = Site(app, bind("127.0.0.1", 0))
    address = site.url
    task = asyncio.create_task(
        serve([site], stop=stop, grace_s=0.2, on_started=started.set, on_deadline=in_flight_of(app).fail_pending)
    )
    await started.wait()
    yield address
    stop.set()
    await task


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    """The `openai` client, as users use it, but without its retries."""
    async with AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client
