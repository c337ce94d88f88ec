"""Short ways to make requests for an engine, to run it, and to read what it gave."""

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from twostroke.engine.engine import Engine
from twostroke.protocol.config import EngineConfig, KVCacheConfig
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.responses import SequenceOutput
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens, unpack_tokens
from twostroke.protocol.transfer import TRANSFER_VERSION, ContextPhaseParams, LayoutFingerprint, TransferHandle

LAYOUT = LayoutFingerprint("fake", "int64", 4, layers=1, kv_heads=1, head_dim=3)


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams`."""

    max_tokens: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[tuple[int, ...], ...]


def engine_config(
    *,
    max_batched_tokens: int = 16,
    max_sequences: int = 8,
    max_waiting: int = 64,
    prefix_caching: bool = True,
    max_leased_share: float = 0.5,
    max_reserved_share: float = 0.5,
) -> EngineConfig:
    """Small budgets, so that a few short requests meet every bound."""
    cache = KVCacheConfig(
        prefix_caching=prefix_caching, max_leased_share=max_leased_share, max_reserved_share=max_reserved_share
    )
    return EngineConfig(
        max_batched_tokens=max_batched_tokens, max_sequences=max_sequences, max_waiting=max_waiting, kv_cache=cache
    )


def make_request(
    client_id: int,
    prompt: Iterable[int],
    *,
    index: int = 0,
    n: int = 1,
    generated: Iterable[int] = (),
    phase: Phase = Phase.FULL,
    cache_salt: str = "",
    deadline_s: float | None = None,
    tell_every: int = 1,
    **sampling: Unpack[SamplingFields],
) -> GenerationRequest:
    """A request with the given tokens; keyword arguments beyond those named are `SamplingParams`."""
    return GenerationRequest(
        key=SequenceKey(client_id, index),
        prompt_ids=pack_tokens(prompt),
        generated_ids=pack_tokens(generated),
        sampling=SamplingParams(**sampling),
        phase=phase,
        cache_salt=cache_salt,
        deadline_s=deadline_s,
        n=n,
        tell_every=tell_every,
    )


def handed_over(request: GenerationRequest, first_tokens: Sequence[int], blocks: int) -> GenerationRequest:
    """What the router sends a generation worker after the context phase of `request` made `first_tokens`."""
    handle = TransferHandle(
        version=TRANSFER_VERSION,
        epoch=1,
        key=request.key,
        address="tcp://127.0.0.1:1",
        layout=LAYOUT,
        blocks=blocks,
        expires_in_s=60.0,
    )
    first = pack_tokens(first_tokens)
    return GenerationRequest(
        key=request.key,
        prompt_ids=request.prompt_ids,
        generated_ids=request.generated_ids + first,
        sampling=request.sampling,
        phase=Phase.GENERATION_ONLY,
        context_phase_params=ContextPhaseParams(
            version=TRANSFER_VERSION,
            handle=handle,
            prompt_tokens=len(unpack_tokens(request.prompt_ids)),
            first_token_ids=first,
        ),
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
    )


def is_idle(engine: Engine) -> bool:
    """Whether a step would do nothing; a function, since type checkers take a property to keep its value."""
    return not engine.has_work


def run_until_idle(engine: Engine, max_steps: int = 2000) -> dict[int, list[SequenceOutput]]:
    """Step until nothing is left to do, recounting all blocks after each step; outputs by client id."""
    outputs: dict[int, list[SequenceOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.key.client_id, []).append(output)
        engine.check()
    raise AssertionError(f"still working after {max_steps} steps: {engine.load()}")


def tokens_of(outputs: Sequence[SequenceOutput], offset: int = 0) -> list[int]:
    """All tokens of one sequence's outputs, whose offsets must join up and of which only the last is final."""
    tokens: list[int] = []
    for output in outputs:
        assert output.offset == offset + len(tokens), f"gap or repeat at {output}"
        tokens += unpack_tokens(output.token_ids)
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return tokens
