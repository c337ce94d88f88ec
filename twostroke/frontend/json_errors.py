"""What every HTTP application of the project does with errors that reach its edge: one JSON form, on every port."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from twostroke.frontend.errors import Problem, problem_of
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.openai_answers import ErrorObject

_NOT_FOUND = 404
Handler = Callable[[Request, Exception], Awaitable[Response]]


def error_handlers() -> Mapping[type[Exception], Handler]:
    """Handlers for a Starlette application: its own refusals, errors raised on purpose, and bugs."""
    return {HTTPException: _on_http_error, TwostrokeError: _on_error, Exception: _on_error}


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, wrong method (whose `Allow` header is kept)."""
    refusal = error if isinstance(error, HTTPException) else HTTPException(500)
    message = f"{request.method} {request.url.path}: {refusal.detail}"
    kind = "not_found_error" if refusal.status_code == _NOT_FOUND else "invalid_request_error"
    response = _answer(Problem(refusal.status_code, ErrorObject(message, kind)))
    response.headers.update(refusal.headers or {})
    return response


async def _on_error(_: Request, error: Exception) -> Response:
    return _answer(problem_of(error))


def _answer(problem: Problem) -> Response:
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return Response(problem.body, problem.status, headers, "application/json")
