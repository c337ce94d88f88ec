"""Random storms over a context and a generation engine: everything that may happen, in any order.

Each storm plays the router, both role parts and the transfers. Requests come, run, are handed over, aborted or
overtaken by their deadline, whole or one index of several; transfers land, fail, or fail without proof that the peer
stopped, and then go on writing into the quarantined blocks. The blocks of both engines are recounted after every step,
the runners check every slot that they read, every leg has exactly one final event, and every token is the one that the
sequence has alone.
"""

import random
from dataclasses import dataclass, field

import pytest

from tests.support.engine_requests import engine_config, handed_over, make_request
from tests.support.fake_runner import FakeRunner, expected_output
from twostroke.engine.engine import Engine
from twostroke.engine.handover import Handover, Reservation
from twostroke.protocol.config import EngineConfig
from twostroke.protocol.errors import InvalidRequestError, OverloadedError, TransferError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import FinishReason, SequenceOutput
from twostroke.protocol.tokens import unpack_tokens
from twostroke.protocol.worker import Role

VOCAB, EOS = 40, 0


@dataclass
class Leg:
    """One request at one engine, and what it gave."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    finals: list[SequenceOutput | Handover] = field(default_factory=list)


@dataclass
class Worker:
    """An engine, its runner and the legs that it was given."""

    engine: Engine
    runner: FakeRunner
    legs: dict[SequenceKey, Leg] = field(default_factory=dict)

    def add(self, request: GenerationRequest) -> None:
        """Submit a leg; a refusal is as good as an end."""
        try:
            self.engine.add(request)
        except (OverloadedError, InvalidRequestError):
            return
        for one in request.sequences():
            self.legs[one.key] = Leg(one)

    def step(self) -> None:
        """One engine step, recounted; offsets join up and nothing follows a final event."""
        for output in self.engine.step():
            self.record(output)
            if output.final:
                self.legs[output.key].finals.append(output)
        self.engine.check()

    def record(self, output: SequenceOutput) -> None:
        """Take the tokens of one output."""
        leg = self.legs[output.key]
        assert not leg.finals, f"{output} follows {leg.finals}"
        assert output.offset == len(leg.request.generated_ids) // 4 + len(leg.tokens)
        leg.tokens += unpack_tokens(output.token_ids)


class Storm:
    """Two workers, and transfers between them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        block_size = rng.choice([1, 2, 4, 8])
        self.context = self._worker(Role.CONTEXT, block_size)
        self.generation = self._worker(Role.GENERATION, block_size)
        self.leases: dict[SequenceKey, Handover] = {}
        self.transfers: dict[SequenceKey, Reservation] = {}
        self.quarantined: dict[SequenceKey, Reservation] = {}
        self.prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 24))] for _ in range(3)]
        self.next_client = 1

    def _worker(self, role: Role, block_size: int) -> Worker:
        rng = self.rng
        runner = FakeRunner(rng.randint(32, 90) // block_size, block_size, VOCAB, 64, (EOS,))
        config: EngineConfig = engine_config(
            max_batched_tokens=rng.choice([1, 3, 8, 24]),
            max_sequences=rng.choice([1, 3, 8]),
            max_waiting=rng.choice([2, 20]),
            prefix_caching=rng.random() < 0.8,
            max_leased_share=rng.choice([0.2, 0.5, 1.0]),
            max_reserved_share=rng.choice([0.2, 0.5, 1.0]),
        )
        return Worker(Engine(runner, config, role, clock=lambda: self.now), runner)

    def submit(self) -> None:
        """A new request, to either worker; most go through both roles."""
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randint(1, 24)] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))
        ]
        max_tokens = rng.randint(1, 16)
        worker, phase = rng.choice(
            [(self.context, Phase.CONTEXT_ONLY)] * 4 + [(self.context, Phase.FULL), (self.generation, Phase.FULL)]
        )
        request = make_request(
            self.next_client,
            prompt,
            phase=phase,
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop_token_ids=rng.choice([(), (rng.randrange(VOCAB),)]),
            ignore_eos=rng.random() < 0.3,
            deadline_s=rng.choice([None, None, rng.uniform(1, 60)]),
            n=rng.choice([1, 1, rng.randint(2, 4)]),
            seed=rng.randrange(1000),
        )
        self.next_client += 1
        worker.add(request)

    def abort(self) -> None:
        """Any request that ever was, or one index of it, at both workers."""
        client_id = self.rng.randrange(1, self.next_client + 1)
        index = self.rng.choice([None, 0, 1, 2])
        for worker in (self.context, self.generation):
            worker.engine.abort(client_id, index)

    def run_context(self) -> None:
        """One step, then what the context role part and the router do with the hand-overs."""
        self.context.step()
        for handover in self.context.engine.take_handovers():
            leg = self.context.legs[handover.key]
            self.context.record(handover.output)
            leg.finals.append(handover)
            self.leases[handover.key] = handover
            if self.rng.random() < 0.9:
                self.generation.add(handed_over(leg.request, leg.tokens, len(handover.blocks)))
        for key in self.context.engine.take_cancellations():
            self.end_lease(key)

    def run_generation(self) -> None:
        """One step, then what the generation role part starts and cancels."""
        self.generation.step()
        for reservation in self.generation.engine.take_reservations():
            self.transfers[reservation.key] = reservation
        for key in self.generation.engine.take_cancellations():
            if key in self.transfers and self.rng.random() < 0.5:
                self.end_transfer(key)

    def end_lease(self, key: SequenceKey) -> None:
        """Read by nobody any more: done, revoked or expired."""
        if key in self.leases:
            del self.leases[key]
            self.context.engine.end_lease(key)

    def end_transfer(self, key: SequenceKey) -> None:
        """It lands if the lease still stands and luck allows; else it fails, at times without proof of its end."""
        reservation, handover = self.transfers.pop(key), self.leases.get(key)
        if handover is not None and self.rng.random() < 0.8:
            self.write(reservation, handover)
            self.generation.engine.adopt(key)
            self.end_lease(key)
            return
        blocks_safe = self.rng.random() < 0.5
        self.generation.engine.fail_reservation(key, TransferError("lost"), blocks_safe=blocks_safe)
        if not blocks_safe:
            self.quarantined[key] = reservation

    def write(self, reservation: Reservation, handover: Handover) -> None:
        """What UCX does."""
        source = [handover.blocks[position] for position in reservation.positions]
        self.generation.runner.copy_blocks_from(self.context.runner, source, reservation.blocks)

    def write_late(self) -> None:
        """A peer that nobody could stop fills quarantined and reserved blocks with whatever it has."""
        for reservation in [*self.quarantined.values(), *self.transfers.values()]:
            for block in reservation.blocks:
                self.generation.runner.slots[block] = self.rng.randrange(1000)

    def end_quarantine(self) -> None:
        """Proof came that a peer has stopped."""
        key = self.rng.choice(list(self.quarantined))
        del self.quarantined[key]
        self.generation.engine.release_quarantine(key)

    def blow(self, moves: int) -> None:
        """Random moves."""
        rng = self.rng
        for _ in range(moves):
            move = rng.random()
            self.now += rng.uniform(0, 0.5)
            if move < 0.2:
                self.submit()
            elif move < 0.23:
                self.abort()
            elif move < 0.5:
                self.run_context()
            elif move < 0.8:
                self.run_generation()
            elif move < 0.95 and self.transfers:
                self.end_transfer(rng.choice(list(self.transfers)))
            elif move < 0.96 and self.leases:
                self.end_lease(rng.choice(list(self.leases)))
            elif move < 0.98 and self.quarantined:
                self.end_quarantine()
            else:
                self.write_late()

    def calm(self) -> None:
        """Let everything come to its end; nothing is aborted for it."""
        for _ in range(5000):
            self.run_context()
            self.run_generation()
            for key in list(self.transfers):
                self.end_transfer(key)
            for key in set(self.leases) - self.transfers.keys() - self.waiting_for_transfer():
                self.end_lease(key)
            while self.quarantined:
                self.end_quarantine()
            if not (self.leases or self.transfers or self.context.engine.has_work or self.generation.engine.has_work):
                return
        raise AssertionError(f"no end: {self.context.engine.load()} {self.generation.engine.load()}")

    def waiting_for_transfer(self) -> set[SequenceKey]:
        """Hand-overs that the generation engine has not finished."""
        return {key for key, leg in self.generation.legs.items() if not leg.finals}


def check_leg(leg: Leg, stats: dict[str, int]) -> None:
    """One final event; tokens as alone, to the end if it ended well."""
    assert len(leg.finals) == 1, leg
    [final] = leg.finals
    sampling = leg.request.sampling
    ending = (*(() if sampling.ignore_eos else (EOS,)), *sampling.stop_token_ids)
    prompt, generated = unpack_tokens(leg.request.prompt_ids), unpack_tokens(leg.request.generated_ids)
    whole = expected_output(prompt, sampling.max_tokens or 0, VOCAB, ending, sampling.min_tokens, seed=sampling.seed)
    output = generated + leg.tokens
    assert output == whole[: len(output)]
    if isinstance(final, Handover):
        stats["handed over"] += 1
        assert len(leg.tokens) == 1
    elif final.error is not None:
        stats[final.error.kind] = stats.get(final.error.kind, 0) + 1
    else:
        stats["done"] += 1
        assert output == whole
        assert (final.finish_reason is FinishReason.STOP) == (whole[-1] in ending)


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_leaves_every_block_free_or_cached_and_every_answer_right(seed: int) -> None:
    """Both engines end empty."""
    print(f"seed {seed}")
    storm = Storm(seed)
    storm.blow(600)
    storm.calm()
    stats = {"handed over": 0, "done": 0}
    for worker in (storm.context, storm.generation):
        for leg in worker.legs.values():
            check_leg(leg, stats)
        blocks = worker.engine.load().blocks
        assert blocks.free + blocks.cached == blocks.total == worker.runner.num_blocks
        assert len(worker.engine._sequences) == 0
