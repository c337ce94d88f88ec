"""`GenerationExecutor`: three verbs, `submit`, `abort_request`, `shutdown`, whatever runs behind them.

All forms behave alike (in-process, ipc, remote; the router is one too):

* The sinks of a request, one for each of its `n` sequences, are registered before it is sent. Whether the engine is
  dead is checked before and after registering, and the entries leave when that check or the send fails.
* Exactly one final event reaches a sink: a final `SequenceOutput` through `feed`, or `fail`.
* A `RequestError` ends one request. Anything else ends the executor: the first such error is recorded, every pending
  sink gets it as `EngineDeadError`, and later submits raise it.
* A response for an unknown key is dropped and counted.
"""

import abc
import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from twostroke.executor.result import Completion, GenerationResult
from twostroke.protocol.errors import TwostrokeError
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.worker import WorkerDescription


class ResultSink(Protocol):
    """Where an executor delivers what becomes of one sequence."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop whose thread must call `wake`; None if nobody awaits on a loop (threads wait by themselves)."""
        ...

    def feed(self, output: SequenceOutput) -> None:
        """Take one output. Called from the executor's receiving thread or loop, in order; must not block or raise."""
        ...

    def fail(self, error: TwostrokeError) -> None:
        """End the sequence with `error`. A sink that has ended already ignores it."""
        ...

    def wake(self) -> None:
        """Let waiters see what was fed. Called after a batch, once or more, on the thread of `loop`."""
        ...


class HealthState(enum.Enum):
    """How an executor fares."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """State and, for people, the reason."""

    state: HealthState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind an executor, as a frontend needs it.

    Attributes:
        name: Served name.
        max_model_len: Prompt and output tokens of one sequence at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Ids that end a sequence unless `ignore_eos`.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, description: WorkerDescription) -> "ServedModel":
        """The model that a worker describes."""
        return cls(description.model, description.max_model_len, description.vocab_size, description.eos_token_ids)


class GenerationExecutor(abc.ABC):
    """Takes requests and gives results; hides where the engine runs."""

    @property
    @abc.abstractmethod
    def model(self) -> ServedModel:
        """The served model.

        Raises:
            EngineDeadError: The worker never became ready, so that nothing is known of its model.
        """

    @abc.abstractmethod
    def draw_client_id(self) -> int:
        """A client id for a new request of this frontend."""

    @abc.abstractmethod
    def submit_to(self, request: GenerationRequest, *sinks: ResultSink) -> None:
        """Register a sink for each of the request's sequences, in the order of its `keys`, then send the request.

        Raises:
            EngineDeadError: The engine is dead; nothing was registered.
            OverloadedError: The bounded queue to the worker is full; nothing was registered.
            ValueError: A key is registered already, or there are not as many sinks as sequences.
        """

    @abc.abstractmethod
    def abort_request(self, client_id: int, index: int | None = None) -> None:
        """End a request, or one index of it: each pending sink gets `AbortedError` at once, and the worker is told.

        A context_only request that was handed over already has no sink any more; the abort then ends its lease.
        An unknown or finished request is no error.
        """

    def complete_request(self, client_id: int, index: int | None = None) -> None:
        """The caller has all that it wants of a request (a stop string came): end it as `abort_request` does.

        The work is taken from the worker in the same way; an executor that keeps books counts the request as done.
        """
        self.abort_request(client_id, index)

    @abc.abstractmethod
    def check_health(self) -> Health:
        """How the executor fares; never blocks or raises."""

    @abc.abstractmethod
    def shutdown(self, deadline_s: float | None = None) -> None:
        """Fail what is pending, end what this executor owns, and return within the deadline; safe to call twice.

        Args:
            deadline_s: Seconds for all of it together; None takes the configured one.
        """

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Send a `request` for one sequence and return its result; errors as `submit_to`."""
        result = self._result(request)
        self.submit_to(request, result)
        return result

    def submit_all(self, request: GenerationRequest) -> list[GenerationResult]:
        """Send `request` and return the result of each of its sequences, by index; errors as `submit_to`."""
        results = [self._result(sequence) for sequence in request.sequences()]
        self.submit_to(request, *results)
        return results

    def _result(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request, lambda: self.abort_request(request.key.client_id, request.key.index))

    def generate(self, request: GenerationRequest, timeout_s: float | None = None) -> Completion:
        """Run `request` to its end, blocking the calling thread.

        Raises:
            RequestError: The request failed.
            TimeoutError: It did not end within `timeout_s`; it is aborted.
        """
        return self.submit(request).wait(timeout_s)

    async def generate_async(self, request: GenerationRequest) -> AsyncIterator[SequenceOutput]:
        """Run `request`, yielding its outputs; leaving the iteration early aborts it."""
        result = self.submit(request)
        try:
            async for output in result:
                yield output
        finally:
            result.abort()
