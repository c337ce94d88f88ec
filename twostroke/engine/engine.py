"""The engine: sequences in, tokens out, one step at a time.

One thread owns an engine and calls everything on it:

    add / abort / end_lease / adopt / ...   between steps
    step()                                  admit -> schedule -> run -> sample -> respond
    take_handovers, take_reservations,      right after each step and in this order, where a role part serves
    take_cancellations                      transfers; take_reservations also right after `admit`

For every sequence that `add` accepts there is exactly one final event: a `SequenceOutput` with a finish reason or an
error (an aborted one gets `ErrorKind.ABORTED`) from a later `step`, or a `Handover`, whose output the role part
completes.
An exception from the runner is fatal: it leaves `step`, and the engine must not be used again.
"""

import itertools
import time
from collections.abc import Callable

from twostroke.engine.block_manager import BlockManager
from twostroke.engine.block_table import BlockTables
from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.deadlines import Deadlines
from twostroke.engine.finish import FinishRules
from twostroke.engine.handover import Handover, Reservation
from twostroke.engine.interfaces import Runner, SampledToken, StepPlan
from twostroke.engine.made import Made
from twostroke.engine.scheduler import Scheduler, SchedulerLimits
from twostroke.engine.sequence import Sequence, SequenceState
from twostroke.engine.sequence_table import SequenceTable
from twostroke.engine.siblings import Siblings
from twostroke.engine.validation import RequestLimits, check_request
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.errors import AbortedError, DeadlineError, InvalidRequestError, OverloadedError, RequestError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.worker import Role, WorkerCounters, WorkerLoad


class Engine:
    """Runs the sequences of one worker.

    Args:
        runner: Computes the steps.
        config: Budgets and shares.
        role: Which phases are run.
        clock: Seconds that never go back; tests give their own.
    """

    def __init__(
        self, runner: Runner, config: EngineConfig, role: Role, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._max_waiting = config.max_waiting
        self._clock = clock
        num_blocks, block_size = runner.cache.num_blocks, runner.facts.layout.block_size
        self._limits = RequestLimits(role, self.facts.vocab_size, self.facts.max_model_len, num_blocks, block_size)
        self._manager = BlockManager(num_blocks, block_size, prefix_caching=config.kv_cache.prefix_caching)
        self._tables = BlockTables(self._manager)
        self._scheduler = Scheduler(self._manager, self._tables, SchedulerLimits.of(config, num_blocks))
        self._siblings = Siblings(self._scheduler, self._tables, prefix_caching=config.kv_cache.prefix_caching)
        self._sequences = SequenceTable()
        self._request_ids = itertools.count(1)
        self._deadlines = Deadlines()
        self._final_outputs: list[SequenceOutput] = []
        self._broken: list[tuple[Sequence, RequestError]] = []
        self._handovers: list[Handover] = []
        self._reservations: list[Reservation] = []
        self._cancellations: list[SequenceKey] = []
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._stalled = False

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something.

        False also while all that is queued waits for a transfer to end; the call that reports its end makes it true.
        """
        if self._final_outputs or self._is_overdue():
            return True
        return not self._stalled and bool(self._scheduler.running or self._scheduler.queued)

    @property
    def unfinished(self) -> bool:
        """Whether any sequence, lease or transfer is left; quarantined blocks alone do not count."""
        return any(one.state is not SequenceState.QUARANTINED for one in self._sequences)

    def client_ids(self) -> set[int]:
        """The requests that are known here, those with a lease or a transfer that ends included."""
        return {one.key.client_id for one in self._sequences}

    def seconds_to_deadline(self) -> float | None:
        """How long until the next deadline passes, so that a loop without work knows how long to sleep; None: never."""
        deadline = self._deadlines.next
        return None if deadline is None else max(0.0, deadline - self._clock())

    def add(self, request: GenerationRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request; each of its `n` sequences has a final event of its own.

        Args:
            request: What to run.
            constraint: Of `request.constraint`, advanced by the output so far; each sequence gets its own copy.

        Raises:
            InvalidRequestError: It can never run here.
            OverloadedError: Too many wait already.
        """
        max_tokens = check_request(request, self._limits)
        if (request.constraint is None) != (constraint is None):
            raise InvalidRequestError(
                "a compiled constraint goes with a request that has one, and only then", "constraint"
            )
        for key in request.keys:
            if self._sequences.get(key) is not None:
                raise InvalidRequestError(f"sequence {key} is known here already", "key")
        if request.n > self._max_waiting:
            raise InvalidRequestError(f"n of {request.n} is more than may wait here ({self._max_waiting})", "n")
        if self._scheduler.queued + request.n > self._max_waiting:
            raise OverloadedError(f"{self._scheduler.queued} requests wait already; try again later")
        leader = self._siblings.awaited_by(request, self._sequences.of_client(request.key.client_id, None))
        for one in request.sequences():
            sequence = self._queue(one, max_tokens, leader)
            sequence.constraint = None if constraint is None else constraint.copy()
            leader = leader or sequence
        self._stalled = False

    def abort(self, client_id: int, index: int | None = None) -> list[SequenceKey]:
        """Give a request up, or one index of it.

        A sequence that has not had its final event gets an `ABORTED` one. A lease, or a transfer under way, is only
        asked to end: the key comes out of `take_cancellations`, and the blocks stay held until the role part reports.

        Returns:
            The sequences that this changed something for; none if all ended before.
        """
        error = AbortedError(f"request {client_id:016x} was aborted")
        return [one.key for one in self._sequences.of_client(client_id, index) if self._give_up(one, error)]

    def admit(self) -> None:
        """End what is overdue, and let in what there is room for; a step begins with it.

        Called on its own before a step, it gives reservations whose transfers run while the step computes.
        """
        self._end_overdue()
        for sequence in self._scheduler.admit():
            params = sequence.request.context_phase_params
            assert params is not None  # noqa: S101 - only generation_only requests are reserved for
            self._reservations.append(
                Reservation(
                    key=sequence.key,
                    request_id=sequence.request_id,
                    handle=params.handle,
                    positions=tuple(range(sequence.landing, len(sequence.blocks))),
                    blocks=tuple(sequence.blocks[sequence.landing :]),
                    waited_s=self._clock() - sequence.queued_at,
                )
            )

    def step(self) -> list[SequenceOutput]:
        """Run one engine step.

        Returns:
            What it made for each sequence, and the final events of those that ended otherwise since the last step.
        """
        self.admit()
        plan = self._schedule()
        sampled = self._run(plan)
        made = self._sample(sampled)
        return self._respond(made)

    def load(self) -> WorkerLoad:
        """How busy the engine is; of the counters it fills those that it knows."""
        scheduler = self._scheduler
        computing = [one.remaining for one in scheduler.running if one.remaining > 1]
        return WorkerLoad(
            running=len(scheduler.running),
            waiting=scheduler.queued,
            waiting_tokens=sum(computing) + sum(one.remaining for one in scheduler.waiting),
            blocks=self._manager.counts,
            admitting=self._limits.role is not Role.CONTEXT or not scheduler.lease_capped,
            counters=WorkerCounters(
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._tables.cached_tokens,
                output_tokens=self._output_tokens,
                preemptions=scheduler.preemptions,
            ),
        )

    def check(self) -> None:
        """Recount every block against the sequences that hold it; for tests and debugging.

        Raises:
            BlockAccountingError: Something does not add up.
        """
        self._tables.check(self._sequences)

    # --- hand-overs: context side ---

    def take_handovers(self) -> list[Handover]:
        """Sequences whose blocks were leased since the last call."""
        handovers, self._handovers = self._handovers, []
        return handovers

    def end_lease(self, key: SequenceKey) -> None:
        """No transfer reads the blocks of `key` any more; they go to the prefix cache. A second call does nothing."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.state is SequenceState.LEASED:
            self._end(sequence)

    # --- hand-overs: generation side ---

    def take_reservations(self) -> list[Reservation]:
        """Sequences that got their blocks since the last call, to be fetched."""
        reservations, self._reservations = self._reservations, []
        return reservations

    def adopt(self, key: SequenceKey) -> bool:
        """All blocks of the reservation `key` have landed: decode from here.

        Returns:
            Whether the sequence goes on; false if it was given up meanwhile (its blocks are released) or is unknown.
        """
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.state is SequenceState.CANCELLING:
            self._end(sequence)
        if sequence is None or sequence.state is not SequenceState.TRANSFERRING:
            return False
        self._scheduler.remove(sequence)
        self._tables.land(sequence)
        self._scheduler.enqueue(sequence)
        self._siblings.dismiss(sequence)
        self._stalled = False
        return True

    def fail_reservation(self, key: SequenceKey, error: RequestError, *, blocks_safe: bool) -> None:
        """The transfer of `key` ended without landing; the sequence fails with `error` unless it had its final event.

        Args:
            key: The sequence.
            error: What its frontend is told.
            blocks_safe: No peer can write to the blocks any more; otherwise they are quarantined.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.state not in (SequenceState.TRANSFERRING, SequenceState.CANCELLING):
            return
        if sequence.state is SequenceState.TRANSFERRING:
            self._fail(sequence, error)
        if blocks_safe or sequence.landing == len(sequence.blocks):
            self._end(sequence)
        else:
            self._scheduler.remove(sequence)
            self._tables.quarantine(sequence)
            self._siblings.hand_on_lead(sequence)
            self._stalled = False

    def release_quarantine(self, key: SequenceKey) -> None:
        """It is proven that no peer can write to the quarantined blocks of `key`: they are free."""
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.state is SequenceState.QUARANTINED:
            self._end(sequence)

    def take_cancellations(self) -> list[SequenceKey]:
        """Sequences given up since the last call whose blocks a transfer may still touch: end it, then report."""
        cancellations, self._cancellations = self._cancellations, []
        return [key for key in cancellations if self._sequences.get(key) is not None]

    # --- one step ---

    def _end_overdue(self) -> None:
        while (request_id := self._deadlines.pop_overdue(self._clock())) is not None:
            sequence = self._sequences.by_request_id(request_id)
            if sequence is not None:
                self._give_up(sequence, DeadlineError(f"not finished within {sequence.request.deadline_s} s"))

    def _schedule(self) -> StepPlan:
        preemptions = self._scheduler.preemptions
        plan = self._scheduler.schedule()
        # Nothing to run and nobody moved: only a call from outside can change that.
        self._stalled = not plan.slices and not self._reservations and preemptions == self._scheduler.preemptions
        return plan

    def _run(self, plan: StepPlan) -> list[SampledToken]:
        """Compute and sample; only then are the blocks that were filled findable for others."""
        if not plan.slices:
            return []
        result = self._runner.run(plan)
        sampled = result.tokens
        asked = [draw.request_id for part in plan.slices if part.sample for draw in part.draws()]
        if [token.request_id for token in sampled] != asked:
            raise RuntimeError(f"the runner sampled {[token.request_id for token in sampled]}, asked for {asked}")
        for scores in result.prompt_scores:
            self._running(scores.request_id).add_prompt_scores(scores.start, scores.logprobs)
        self._steps += 1
        for piece in plan.slices:
            sequence = self._running(piece.request_id)
            end = piece.start + len(piece.token_ids)
            self._prompt_tokens += max(0, min(end, sequence.prompt_tokens) - piece.start)
            sequence.computed += len(piece.token_ids)
            self._tables.publish(sequence)
        return sampled

    def _sample(self, sampled: list[SampledToken]) -> list[Made]:
        """Give the tokens to their sequences, and see which end."""
        made = []
        for token in sampled:
            sequence = self._running(token.request_id)
            if sequence.leader is not None:
                sequence.take_over_prompt(sequence.leader)
            try:
                sequence.append(token.token_id)
            except RequestError as error:
                self._broken.append((sequence, error))
                continue
            finish = sequence.finish()
            made.append(Made(sequence, token, finish))
        self._output_tokens += len(made)
        return made

    def _respond(self, made: list[Made]) -> list[SequenceOutput]:
        outputs, self._final_outputs = self._final_outputs, []
        for one in made:
            if not one.due:
                one.hold_back()
                continue
            output = one.output()
            if one.finish is None and one.sequence.request.phase is Phase.CONTEXT_ONLY:
                self._lease(one.sequence, output)
                continue
            if one.finish is None:
                self._siblings.fork(one.sequence)
            outputs.append(output)
        # Last, since others take blocks of a leader that ends; and followers first, so that none of them gets the lead.
        for one in reversed(made):
            if one.finish is not None:
                self._end(one.sequence)
        broken, self._broken = self._broken, []
        for sequence, error in broken:
            self._give_up(sequence, error)
        return outputs

    def _queue(self, request: GenerationRequest, max_tokens: int, leader: Sequence | None) -> Sequence:
        rules = FinishRules(request.sampling, self.facts.eos_token_ids, max_tokens, self.facts.max_model_len)
        sequence = Sequence(next(self._request_ids), request, rules, self.facts.layout.model, leader)
        sequence.queued_at = self._clock()
        self._sequences.add(sequence)
        self._scheduler.enqueue(sequence)
        if request.deadline_s is not None:
            self._deadlines.set(sequence.request_id, self._clock() + request.deadline_s)
        return sequence

    # --- ends ---

    def _lease(self, sequence: Sequence, output: SequenceOutput) -> None:
        self._deadlines.drop(sequence.request_id)
        self._scheduler.remove(sequence)
        self._siblings.lease(sequence)
        self._handovers.append(
            Handover(
                key=sequence.key,
                request_id=sequence.request_id,
                blocks=tuple(sequence.blocks),
                prompt_tokens=sequence.prompt_tokens,
                output=output,
            )
        )

    def _give_up(self, sequence: Sequence, error: RequestError) -> bool:
        """End a sequence before its time; whether that changed anything."""
        match sequence.state:
            case SequenceState.CANCELLING | SequenceState.QUARANTINED:
                return False
            case SequenceState.LEASED:
                self._cancellations.append(sequence.key)
            case SequenceState.TRANSFERRING:
                self._fail(sequence, error)
                self._cancellations.append(sequence.key)
                self._scheduler.remove(sequence)
                sequence.move(SequenceState.CANCELLING)
                self._siblings.hand_on_lead(sequence)
            case _:
                self._fail(sequence, error)
                self._end(sequence)
        return True

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        """Tell the frontend, in the next step's outputs."""
        self._deadlines.drop(sequence.request_id)
        self._final_outputs.append(SequenceOutput(sequence.key, sequence.told_tokens, error=error.to_info()))

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._tables.release(sequence, SequenceState.ENDED)
        self._sequences.remove(sequence)
        self._siblings.leave(sequence)
        self._deadlines.drop(sequence.request_id)
        self._stalled = False

    def _is_overdue(self) -> bool:
        deadline = self._deadlines.next
        return deadline is not None and deadline <= self._clock()

    def _running(self, request_id: int) -> Sequence:
        sequence = self._sequences.by_request_id(request_id)
        assert sequence is not None  # noqa: S101 - a planned sequence stays in the table until the step responds
        return sequence
