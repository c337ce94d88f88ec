"""The admin port: what the router knows of its requests and workers, as JSON, for operators only.

    GET /ledger[?limit=N]   open requests, then the last N that ended
    GET /workers            every worker address, its state, and what it reported last
    GET /health             200 while the process answers

Times are durations in seconds: an entry's age, and what each phase took. Client ids are 16 hex digits, since a 64-bit
number does not survive every JSON parser.
"""

import itertools

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.executor import RouterExecutor
from router.ledger import HISTORY, LedgerEntry
from router.workers import WorkerSlot
from twostroke.frontend.json_errors import error_handlers
from twostroke.protocol.openai_answers import ErrorBody, ErrorObject
from twostroke.protocol.worker import Role

DEFAULT_LIMIT = 100

Named = dict[str, object]
"""A protocol struct by field name; see `_named`."""


class PhaseView(msgspec.Struct, frozen=True):
    """One phase of an entry; `seconds` so far, if it is the present one."""

    phase: str
    seconds: float


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger entry; see `LedgerEntry` for the fields."""

    client_id: str
    phase: str
    age_s: float
    phases: list[PhaseView]
    attempt: int
    n: int
    context_worker: str | None
    generation_worker: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None


class LedgerView(msgspec.Struct, frozen=True):
    """Answer of `/ledger`."""

    counts: dict[str, int]
    open: list[EntryView]
    ended: list[EntryView]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker address; the fields from `epoch` on are those of the attached worker, if there is one."""

    address: str
    role: Role
    source: str
    state: str
    reason: str
    failures: int
    epoch: int | None = None
    silence_s: float | None = None
    placed: int | None = None
    load: Named | None = None
    description: Named | None = None


class WorkersView(msgspec.Struct, frozen=True):
    """Answer of `/workers`."""

    ready: bool
    waiting: int
    workers: list[WorkerView]


def create_admin_app(executor: RouterExecutor) -> Starlette:
    """The ASGI application of the admin port."""

    async def ledger(request: Request) -> Response:
        text = request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not text.isdecimal() or int(text) > HISTORY:
            message = f"limit must be a number from 0 to {HISTORY}, not {text!r}"
            return _json(ErrorBody(ErrorObject(message, "invalid_request_error", "limit")), 400)
        return _json(ledger_view(executor, int(text)))

    async def workers(_: Request) -> Response:
        return _json(workers_view(executor))

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    return Starlette(
        routes=[Route("/ledger", ledger), Route("/workers", workers), Route("/health", health)],
        exception_handlers=error_handlers(),
    )


def ledger_view(executor: RouterExecutor, limit: int) -> LedgerView:
    """Open entries, oldest first, and the last `limit` that ended, latest first."""
    ledger = executor.ledger
    now = ledger.now()
    counts = ledger.open_counts() + ledger.ended_counts()
    return LedgerView(
        {str(phase): count for phase, count in counts.items()},
        [entry_view(entry, now) for entry in ledger.open_entries()],
        [entry_view(entry, now) for entry in itertools.islice(ledger.ended_entries(), limit)],
    )


def entry_view(entry: LedgerEntry, now_s: float) -> EntryView:
    """One entry at `now_s` of the ledger's clock; an ended one stands still."""
    until_s = entry.phase_since_s if entry.ended else now_s
    times = [move.at_s for move in entry.moves] + [until_s]
    return EntryView(
        client_id=f"{entry.client_id:016x}",
        phase=entry.phase,
        age_s=until_s - entry.opened_s,
        phases=[PhaseView(move.phase, after - move.at_s) for move, after in zip(entry.moves, times[1:], strict=True)],
        attempt=entry.attempt,
        n=entry.n,
        context_worker=entry.context_worker,
        generation_worker=entry.generation_worker,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=entry.output_tokens,
        error=entry.error,
    )


def workers_view(executor: RouterExecutor) -> WorkersView:
    """All worker addresses."""
    return WorkersView(
        executor.pool.missing_role() is None,
        executor.waiting,
        [_worker_view(slot) for slot in executor.pool.slots()],
    )


def _worker_view(slot: WorkerSlot) -> WorkerView:
    view = WorkerView(
        address=slot.address,
        role=slot.role,
        source=slot.source,
        state=slot.state,
        reason=slot.reason,
        failures=slot.failures,
    )
    worker = slot.worker
    if worker is None:
        return view
    return msgspec.structs.replace(
        view,
        epoch=worker.link.epoch,
        silence_s=worker.link.silence_s,
        placed=worker.sequences,
        load=_named(worker.link.load),
        description=_named(worker.link.description),
    )


def _named(struct: msgspec.Struct) -> Named:
    """`struct` as a JSON object with field names, also where its wire form is an array."""
    fields = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    return {name: _named(value) if isinstance(value, msgspec.Struct) else value for name, value in fields}


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
