"""The OpenAI HTTP application over any executor.

POST /v1/completions, /v1/chat/completions     generate
POST /tokenize, /detokenize                    what the tokenizer makes of a text, and back
GET  /v1/models                                what is served
GET  /health                                   200 while the process lives and its executor is not dead
GET  /ready                                    200 while requests can be taken
GET  /metrics                                  Prometheus
GET  /openapi.json                             all of this, for programs
"""

import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from twostroke.executor.base import GenerationExecutor, HealthState
from twostroke.frontend import openapi
from twostroke.frontend.auth import ApiKeys, AsyncApp, RequireApiKey
from twostroke.frontend.chat import ChatSurface
from twostroke.frontend.completions import CompletionSurface
from twostroke.frontend.conversation import Conversations
from twostroke.frontend.endpoint import GenerationEndpoint, Limits
from twostroke.frontend.errors import ApiError, Kind
from twostroke.frontend.in_flight import InFlight
from twostroke.frontend.intake import Intake, served_model
from twostroke.frontend.json_errors import error_handlers
from twostroke.frontend.metrics import FrontendMetrics
from twostroke.frontend.tokenize import AnswerEndpoint, Tokenizing
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.config import ClusterConfig, ToolFamily
from twostroke.protocol.openai_answers import HealthReport, Model, ModelList


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """How a frontend serves.

    Attributes:
        request_timeout_s: A request that takes longer ends with 504.
        max_in_flight: Choices at the same time at most; more get 429.
        max_n: Choices of one prompt at most.
        max_body_bytes: Longer bodies get 413.
        keep_alive_s: A stream that is silent for so long gets a comment, so that no proxy takes it for dead.
        allow_chat_template: Requests may bring a chat template of their own.
        tool_family: The syntax of the model's tool calls.
        api_keys: Who may use `/v1/...`; None lets everybody.
    """

    request_timeout_s: float = 600.0
    max_in_flight: int = 4096
    max_n: int = 128
    max_body_bytes: int = 8 << 20
    keep_alive_s: float = 15.0
    allow_chat_template: bool = False
    tool_family: ToolFamily = ToolFamily.AUTO
    api_keys: ApiKeys | None = None

    @classmethod
    def configured(cls, config: ClusterConfig) -> "FrontendOptions":
        """The options that the configuration asks for.

        Raises:
            ConfigError: The file of API keys cannot be used.
        """
        keys_file = config.security.api_keys_file
        return cls(
            request_timeout_s=config.router.request_timeout_s,
            max_in_flight=config.frontend.max_in_flight,
            max_n=config.frontend.max_n,
            max_body_bytes=config.frontend.max_body_bytes,
            keep_alive_s=config.frontend.keep_alive_s,
            allow_chat_template=config.frontend.allow_chat_template,
            tool_family=config.frontend.tool_family,
            api_keys=None if keys_file is None else ApiKeys.load(keys_file),
        )


def create_app(
    executor: GenerationExecutor, text: TextModel, options: FrontendOptions, registry: CollectorRegistry
) -> Starlette:
    """The application. It neither starts nor shuts down `executor`.

    Args:
        executor: Runs the requests.
        text: The model's tokenizer and chat template.
        options: How to serve.
        registry: What `/metrics` shows; the application adds its own instruments.
    """
    in_flight = InFlight(executor, options.max_in_flight)
    metrics = FrontendMetrics(registry)
    limits = Limits(options.max_body_bytes, options.request_timeout_s, options.keep_alive_s)
    conversations = Conversations(
        allow_templates=options.allow_chat_template, template=text.chat_template, tool_family=options.tool_family
    )
    intake = Intake(executor, text, options.max_n)
    completions, chat = (
        GenerationEndpoint(surface, executor, text, in_flight=in_flight, metrics=metrics, limits=limits)
        for surface in (CompletionSurface(intake, text), ChatSurface(intake, text, conversations))
    )
    tokenizing = Tokenizing(executor, text, conversations)
    tokenize, detokenize = (
        AnswerEndpoint(answer, in_flight, options.max_body_bytes)
        for answer in (tokenizing.tokenize, tokenizing.detokenize)
    )
    probes = _Probes(executor, in_flight, registry)
    generating: dict[str, AsyncApp] = {"/v1/completions": completions, "/v1/chat/completions": chat}
    if options.api_keys is not None:
        generating = {path: RequireApiKey(endpoint, options.api_keys) for path, endpoint in generating.items()}
    app = _Frontend(
        generating,
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/models", probes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", probes.model, methods=["GET"]),
            Route("/health", probes.health, methods=["GET"]),
            Route("/ready", probes.ready, methods=["GET"]),
            Route("/metrics", probes.metrics, methods=["GET"]),
            Route(openapi.PATH, probes.openapi, methods=["GET"]),
        ],
        middleware=[Middleware(RequireApiKey, keys=options.api_keys)] if options.api_keys is not None else [],  # type: ignore[arg-type] # Starlette's applications do give coroutines
        exception_handlers=error_handlers(),
    )
    app.router.redirect_slashes = False  # a redirect is no answer to a POST; the path is simply unknown
    app.state.in_flight = in_flight
    return app


class _Frontend(Starlette):
    """The application; what generates is reached directly.

    Its endpoints answer every error of theirs by themselves, and the middleware that does so for all others takes its
    time on each chunk of a stream.

    Args:
        generating: Endpoints by path; they answer POST, and are among the routes too.
        options: Starlette's.
    """

    def __init__(self, generating: Mapping[str, AsyncApp], **options: Any) -> None:
        super().__init__(**options)
        self._generating = generating

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Serve one request; what is awaited is the endpoint's own coroutine, without one around it."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._generating.get(scope["path"])
            if endpoint is not None:
                return endpoint(scope, receive, send)
        return super().__call__(scope, receive, send)


def in_flight_of(app: Starlette) -> InFlight:
    """The running requests of an application that `create_app` made: what the server's stop hooks act on."""
    in_flight = app.state.in_flight
    if not isinstance(in_flight, InFlight):
        raise TypeError(f"not an application of create_app: its state holds {in_flight!r}")
    return in_flight


class _Probes:
    """The endpoints that generate nothing."""

    def __init__(self, executor: GenerationExecutor, in_flight: InFlight, registry: CollectorRegistry) -> None:
        self._executor = executor
        self._in_flight = in_flight
        self._registry = registry
        self._started = int(time.time())

    async def models(self, _: Request) -> Response:
        return _json(ModelList("list", [self._model()]))

    async def model(self, request: Request) -> Response:
        model = self._model()
        name = request.path_params["name"]
        if name != model.id:
            message = f"the model `{name}` does not exist here; the served model is `{model.id}`"
            raise ApiError(Kind.NOT_FOUND, message, "model", "model_not_found")
        return _json(model)

    async def health(self, _: Request) -> Response:
        """Dead only if a restart is the cure: starting and stopping are healthy."""
        health = self._executor.check_health()
        dead = health.state is HealthState.DEAD
        return _json(HealthReport(health.state.value, health.reason), 503 if dead else 200)

    async def ready(self, _: Request) -> Response:
        health = self._executor.check_health()
        if self._in_flight.stopping:
            return _json(HealthReport("stopping", "this server is shutting down"), 503)
        ready = health.state is HealthState.READY
        return _json(HealthReport(health.state.value, health.reason), 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        return Response(openapi.document(), media_type="application/json")

    def _model(self) -> Model:
        model = served_model(self._executor)
        return Model(model.name, "model", self._started, "twostroke", model.max_model_len)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
