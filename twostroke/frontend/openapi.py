"""The OpenAPI document at `/openapi.json`, made from the structs that bodies and answers are made of."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from twostroke.frontend.errors import CLIENT_LEFT, Kind
from twostroke.protocol.openai import (
    INTERNAL,
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NotServed,
    TokenizeBody,
)
from twostroke.protocol.openai_answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    HealthReport,
    Model,
    ModelList,
    Tokenized,
)

PATH = "/openapi.json"
JSON = "application/json"
EVENTS = "text/event-stream"
_REF = "#/components/schemas/{name}"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        method: In small letters.
        path: With `{name}` for what varies.
        summary: What it does.
        answer: Struct of the answer with status 200; None where it is no JSON object of ours.
        media: Media types of that answer.
        body: Struct of the request's body, if there is one.
        failures: The statuses of failures, beside those that every operation may have.
    """

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    media: tuple[str, ...] = (JSON,)
    body: type[msgspec.Struct] | None = None
    failures: tuple[int, ...] = ()


_GENERATING = tuple(sorted({kind.value[0] for kind in Kind} - {405, CLIENT_LEFT}))

OPERATIONS: Sequence[Operation] = (
    Operation("post", "/v1/completions", "Continue a prompt", Completion, (JSON, EVENTS), CompletionBody, _GENERATING),
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatCompletion, (JSON, EVENTS), ChatBody, _GENERATING),
    Operation("post", "/tokenize", "Tokens of a prompt", Tokenized, (JSON,), TokenizeBody, _GENERATING),
    Operation("post", "/detokenize", "Text of tokens", Detokenized, (JSON,), DetokenizeBody, _GENERATING),
    Operation("get", "/v1/models", "What is served", ModelList, failures=(401, 503)),
    Operation("get", "/v1/models/{name}", "One served model", Model, failures=(401, 404, 503)),
    Operation("get", "/health", "Whether the process is well", HealthReport),
    Operation("get", "/ready", "Whether requests can be taken", HealthReport),
    Operation("get", "/metrics", "Measurements, for Prometheus", None, ("text/plain",)),
    Operation("get", PATH, "This document", None),
)
"""Everything that the public port serves."""


@functools.cache
def document() -> bytes:
    """The OpenAPI 3.1 document, in JSON."""
    structs = [struct for one in OPERATIONS for struct in (one.body, one.answer) if struct is not None] + [ErrorBody]
    shown = [_as_served(struct) if issubclass(struct, NotServed) else struct for struct in structs]
    references, schemas = msgspec.json.schema_components(shown, ref_template=_REF)
    by_struct = dict(zip(structs, references, strict=True))
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, by_struct)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "twostroke", "version": version("twostroke")},
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _as_served(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """`struct` without the fields that are there only to be refused: they are no part of what clients may send."""
    fields = [field for field in msgspec.structs.fields(struct) if field.name not in REFUSED.keys() | INTERNAL]
    return msgspec.defstruct(
        struct.__name__,
        [(one.name, one.type) if one.required else (one.name, one.type, one.default) for one in fields],
        namespace={"__doc__": struct.__doc__},
        kw_only=True,
    )


def _described(operation: Operation, schemas: Mapping[type[msgspec.Struct], Json]) -> Json:
    answer = {} if operation.answer is None else {"schema": schemas[operation.answer]}
    content = {media: {} if media == EVENTS else answer for media in operation.media}
    responses: Json = {"200": {"description": operation.summary, "content": content}}
    failure = {JSON: {"schema": schemas[ErrorBody]}}
    for status in operation.failures:
        responses[str(status)] = {"description": "The request failed; see `error`", "content": failure}
    if operation.answer is HealthReport:
        responses["503"] = {"description": "It is not", "content": content}
    described: Json = {"summary": operation.summary, "responses": responses}
    if 401 in operation.failures:  # noqa: PLR2004 - unauthenticated
        described["security"] = [{}, {"key": []}]
    if "{name}" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[operation.body]}}}
    return described
