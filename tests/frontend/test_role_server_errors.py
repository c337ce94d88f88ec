"""A role's server answers mistakes in the project's JSON form, as the public port does."""

import httpx
import pytest

from twostroke.frontend.role_server import RoleServer
from twostroke.protocol.config import ClusterConfig
from twostroke.protocol.worker import Role


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [("GET", "/v1/models", 404, "not_found_error"), ("POST", "/ready", 405, "invalid_request_error")],
)
async def test_unknown_paths_and_wrong_methods(method: str, path: str, status: int, kind: str) -> None:
    """A client that speaks to a server instead of the router learns so from a well-formed error."""
    app = RoleServer(Role.CONTEXT, "no.world", ClusterConfig(), b"").app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        answer = await http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, kind)
    assert error["message"].startswith(f"{method} {path}: ")
    assert ("GET" in answer.headers.get("allow", "")) is (status == 405)
