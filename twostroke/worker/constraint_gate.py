"""Holds the requests whose grammar is being compiled, so that the engine gets them when they can run.

    hold --compiled, or found wrong--> taken --> the engine, or a refusal

Meanwhile the engine serves all others. An abort of a held request is kept and handed on with it: what it ends, and what
its frontend is told, is the engine's business. All of it happens on the engine thread but the compilation itself.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.constraint_compiler import ConstraintCompiler, outcome_of
from twostroke.protocol.errors import InvalidRequestError, OverloadedError, RequestError
from twostroke.protocol.requests import Abort, GenerationRequest
from twostroke.protocol.tokens import unpack_tokens

MAX_HELD = 1024
"""Requests that may wait for their grammar at a time."""


@dataclass(slots=True)
class Held:
    """One request at the gate.

    Attributes:
        request: As it arrived.
        compiling: Its grammar.
        arrived: When, on the loop's clock.
        aborts: What was asked for since.
    """

    request: GenerationRequest
    compiling: "Future[TokenConstraint]"
    arrived: float
    aborts: list[Abort] = field(default_factory=list)

    def outcome(self) -> TokenConstraint | RequestError:
        """The compiled grammar, or why there is none."""
        return outcome_of(self.compiling)

    def remaining(self, now: float) -> GenerationRequest:
        """The request with what is left of its time."""
        if self.request.deadline_s is None:
            return self.request
        return msgspec.structs.replace(self.request, deadline_s=max(0.0, self.request.deadline_s - now + self.arrived))


class ConstraintGate:
    """The held requests of one worker.

    Args:
        compiler: Compiles; None for a worker that cannot, which refuses such requests.
        wake: Called, from another thread, when a request may be taken.
        clock: Seconds that never go back.
    """

    def __init__(
        self, compiler: ConstraintCompiler | None, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._compiler = compiler
        self._wake = wake
        self._clock = clock
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def ready(self) -> bool:
        """Whether a request may be taken."""
        return any(one.compiling.done() for one in self._held)

    def hold(self, request: GenerationRequest) -> None:
        """Keep a request that has a constraint until its grammar is there.

        Raises:
            InvalidRequestError: This worker cannot constrain outputs.
            OverloadedError: Too many are held.
        """
        if self._compiler is None:
            message = "this worker cannot constrain outputs: its model folder has no tokenizer.json that it can use"
            raise InvalidRequestError(message, "constraint")
        if len(self._held) >= MAX_HELD:
            raise OverloadedError(f"{len(self._held)} requests wait for their grammar already; try again later")
        assert request.constraint is not None  # noqa: S101 - the caller's condition
        compiling = self._compiler.start(request.constraint, unpack_tokens(request.generated_ids))
        self._held.append(Held(request, compiling, self._clock()))
        compiling.add_done_callback(lambda _: self._wake())

    def take_ready(self) -> list[Held]:
        """The requests whose grammar is there, in order of arrival; they are not held any longer."""
        taken = [one for one in self._held if one.compiling.done()]
        if taken:
            self._held = [one for one in self._held if one not in taken]
        return taken

    def take_all(self) -> list[Held]:
        """All that are held: the worker ends."""
        taken, self._held = self._held, []
        return taken

    def abort(self, abort: Abort) -> bool:
        """Keep an abort for the request that it means; whether one is held."""
        meant = [one for one in self._held if one.request.key.client_id == abort.client_id]
        for one in meant:
            one.aborts.append(abort)
        return bool(meant)

    def client_ids(self) -> set[int]:
        """The held requests."""
        return {one.request.key.client_id for one in self._held}
