"""The contracts inside the engine: what the scheduler plans, what the runner does with it, and what comes out.

One engine step is: admit -> schedule -> run -> sample -> respond. The scheduler and the block manager are plain Python
and own all accounting; the runner owns all tensors. Between them go `StepPlan` and `SampledToken`. What there is one of
for each token of each step is a msgspec struct, which takes a fifth of a frozen dataclass's time to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec
from msgspec import structs

from twostroke.engine.constraint import TokenConstraint
from twostroke.engine.token_history import TokenHistory
from twostroke.protocol.prompt_logprobs import PromptLogprobs
from twostroke.protocol.responses import TokenLogprobs
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.transfer import LayoutFingerprint


@dataclass(frozen=True, slots=True)
class Sibling:
    """A sequence of the same request, whose first token is sampled from the same logits.

    Attributes:
        request_id: The engine's own id of it.
        sampling: Its parameters: another seed.
    """

    request_id: int
    sampling: SamplingParams


class SequenceSlice(msgspec.Struct, frozen=True):
    """The part of one sequence that a step computes.

    Attributes:
        request_id: The engine's own id of the sequence.
        token_ids: Tokens to compute, at positions `start .. start + len(token_ids)`.
        start: Position of the first of them; K and V of all positions before it are in the cache.
        blocks: The sequence's block table: block `i` holds positions from `i * block_size`; covers all computed.
        sample: Whether the last token's logits are sampled (false for all but the last chunk of a prompt).
        sampling: The request's parameters.
        output_index: Index in the whole output of the token to sample; keys the random numbers.
        forbidden_ids: Token ids that must not be chosen now (`min_tokens`, `bad_words`), sorted.
        history: The tokens so far, for penalties; None without any.
        constraint: Which tokens may come at all; None for every one. Only read here.
        prompt_targets: The prompt tokens that follow the slice's first ones and whose logprobs are asked for.
        siblings: Sequences that are sampled from the last token's logits too.
    """

    request_id: int
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    sampling: SamplingParams
    output_index: int
    forbidden_ids: tuple[int, ...] = ()
    history: TokenHistory | None = None
    constraint: TokenConstraint | None = None
    prompt_targets: Sequence[int] = ()
    siblings: Sequence[Sibling] = ()

    def draws(self) -> list[Self]:
        """The slice for each token that is sampled from its logits: its own sequence's, then its siblings'."""
        own = structs.replace(self, siblings=()) if self.siblings else self
        return [
            own,
            *(structs.replace(own, request_id=one.request_id, sampling=one.sampling) for one in self.siblings),
        ]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: the slices in batch order (decodes, of one token each, come before chunks)."""

    slices: Sequence[SequenceSlice]

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(part.token_ids) for part in self.slices)


class SampledToken(msgspec.Struct, frozen=True):
    """The token chosen for one slice that asked for it."""

    request_id: int
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of the `prompt_targets` of one slice, which started at position `start`."""

    request_id: int
    start: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made.

    Attributes:
        tokens: One entry for each slice with `sample`, in batch order, each followed by those of its siblings.
        prompt_scores: One entry for each slice with `prompt_targets`, in batch order.
    """

    tokens: list[SampledToken]
    prompt_scores: list[PromptScores]


class QueuedWork(Protocol):
    """A moment in a device's work."""

    def reached(self) -> bool:
        """Whether all that was queued before has ended; never waits."""
        ...


class CacheDevice(Protocol):
    """What the transfer must know of a device that computes behind the caller's back; `device` says more of it."""

    @property
    def torch_device(self) -> object:
        """Its name in torch."""
        ...

    def event(self) -> QueuedWork:
        """The moment after all that the calling thread has queued so far."""
        ...


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The rank's KV cache as raw memory, for the transfer.

    Attributes:
        address: Address of block 0.
        block_bytes: Bytes of one block; block `i` starts at `address + i * block_bytes`.
        num_blocks: How many.
        owner: Keeps the memory alive (the tensor).
        gpu: The GPU that it lies on; None for memory of the host.
    """

    address: int
    block_bytes: int
    num_blocks: int
    owner: object
    gpu: CacheDevice | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine must know of a loaded model.

    Attributes:
        vocab_size: Size of the logits.
        max_model_len: Positions that the model can serve.
        eos_token_ids: From generation_config.json, or else the config.
        layout: Layout of the KV cache, the model's digest included.
        block_bytes: Bytes of one KV block on this rank.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    layout: LayoutFingerprint
    block_bytes: int


class Runner(Protocol):
    """Runs one step. `model_runner.ModelRunner` is the one that loads a model; tests use an instant fake."""

    facts: ModelFacts
    cache: CacheMemory

    def run(self, plan: StepPlan) -> StepResult:
        """Compute all slices, write their K and V into the cache, and sample and score where asked.

        A sampled token does not depend on what else is in the batch.
        """
        ...
