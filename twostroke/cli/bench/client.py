"""Sends requests over pooled connections and records what comes back."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from twostroke.cli.bench.connection import Connection, Target
from twostroke.cli.bench.record import RequestRecord
from twostroke.cli.bench.stream import StreamState
from twostroke.cli.bench.workload import Work
from twostroke.protocol.errors import TwostrokeError

HTTP_OK = 200
MODELS_S = 10.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How requests are sent.

    Attributes:
        model: Served name.
        api_key: None sends no authorization.
        chat: Chat completions instead of completions.
        ignore_eos: Ask for outputs of full length with the extension field of that name.
        timeout_s: Of a whole request.
    """

    model: str
    api_key: str | None = None
    chat: bool = False
    ignore_eos: bool = True
    timeout_s: float = 600.0


class BenchClient:
    """One endpoint's client, for one event loop.

    Args:
        target: Where.
        options: How.
    """

    def __init__(self, target: Target, options: ClientOptions) -> None:
        self._target = target
        self._options = options
        self._idle: list[Connection] = []

    async def send(self, work: Work, record: RequestRecord) -> None:
        """Send one request and fill `record` as its answer streams in; failures are recorded, not raised."""
        state = StreamState()

        def on_body(data: bytes) -> None:
            if state.push(data):
                record.chunk_times.append(time.monotonic())

        try:
            async with asyncio.timeout(self._options.timeout_s):
                status = await self._exchange(self._request(work), on_body)
            record.error = f"http {status}" if status != HTTP_OK else state.error
            if record.error is None and not state.done:
                record.error = "stream ended early"
        except TimeoutError:
            record.error = "timeout"
        except ConnectionRefusedError:
            record.error = "connection refused"
        except ConnectionError:
            record.error = "connection lost"
        except OSError:
            record.error = "cannot connect"
        record.prompt_tokens, record.output_tokens = state.prompt_tokens, state.output_tokens
        record.ended = time.monotonic()

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        """A connection that the server closed while it lay idle is replaced, as long as nothing was answered."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._use(connection, request, on_body)
            except ConnectionError:
                if connection.touched:
                    raise
        return await self._use(await Connection.open(self._target), request, on_body)

    async def _use(self, connection: Connection, request: bytes, on_body: Callable[[bytes], None]) -> int:
        status = await connection.exchange(request, on_body)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def _request(self, work: Work) -> bytes:
        options = self._options
        fields: dict[str, object] = {
            "model": options.model,
            "max_tokens": work.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            fields["ignore_eos"] = True
        if options.chat:
            fields["messages"] = [{"role": "user", "content": work.prompt}]
        else:
            fields["prompt"] = work.prompt
        path = "/chat/completions" if options.chat else "/completions"
        return self._target.request("POST", path, msgspec.json.encode(fields), options.api_key)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(target: Target, api_key: str | None) -> str:
    """The name of the first model that the endpoint lists.

    Raises:
        TwostrokeError: It cannot be reached or lists none.
    """
    body: list[bytes] = []
    where = f"{target.host}:{target.port}"
    try:
        async with asyncio.timeout(MODELS_S):
            connection = await Connection.open(target)
            status = await connection.exchange(target.request("GET", "/models", api_key=api_key), body.append)
        connection.close()
        if status != HTTP_OK:
            raise TwostrokeError(f"{where}: /v1/models answered {status}; name the model with --model")
        return msgspec.json.decode(b"".join(body), type=_Models).data[0].id
    except (OSError, TimeoutError) as error:
        raise TwostrokeError(f"{where} cannot be reached: {error or 'it does not answer'}") from None
    except (msgspec.DecodeError, IndexError):
        raise TwostrokeError(f"{where}: /v1/models lists no model; name it with --model") from None
