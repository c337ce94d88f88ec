"""Which requests an engine can run; all others are refused before they are queued, never cut short."""

from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.requests import GenerationRequest, Phase
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import token_count, unpack_tokens
from twostroke.protocol.worker import Role

_SERVED_BY = {Phase.CONTEXT_ONLY: Role.CONTEXT, Phase.GENERATION_ONLY: Role.GENERATION}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one engine can take.

    Attributes:
        role: Phases that it runs; `FULL` is run by every role.
        vocab_size: Token ids are below it.
        max_model_len: Prompt and output tokens of one sequence at most.
        num_blocks: KV blocks in all.
        block_size: Tokens in a block.
    """

    role: Role
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int


def check_request(request: GenerationRequest, limits: RequestLimits) -> int:
    """Check a request, and deduce its `max_tokens` where it does not say: what `max_model_len` and the cache leave.

    Returns:
        Output tokens at most, those of `generated_ids` included.

    Raises:
        InvalidRequestError: It cannot be run here; says why, with the values.
    """
    served_by = _SERVED_BY.get(request.phase, limits.role)
    if served_by is not limits.role:
        raise InvalidRequestError(f"a {limits.role} worker does not run {request.phase} requests", "phase")
    _check_ids(unpack_tokens(request.prompt_ids), limits.vocab_size, "prompt")
    _check_ids(unpack_tokens(request.generated_ids), limits.vocab_size, "generated_ids")
    _check_sampling_ids(request.sampling, limits.vocab_size)
    if request.phase is Phase.GENERATION_ONLY:
        _check_handover(request, limits.block_size)
    max_tokens = _deduce_max_tokens(request, limits)
    _check_cache(request, max_tokens, limits)
    generated = token_count(request.generated_ids)
    if generated >= max_tokens:
        raise InvalidRequestError(
            f"generated_ids ({generated} tokens) leave nothing to make: max_tokens is {max_tokens}", "generated_ids"
        )
    return max_tokens


def _check_sampling_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids((token_id for token_id, _ in sampling.logit_bias), vocab_size, "logit_bias")
    for word in sampling.bad_words:
        _check_ids(word, vocab_size, "bad_words")


def _check_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{param} holds token id {token_id}, outside 0..{vocab_size - 1}", param)


def _deduce_max_tokens(request: GenerationRequest, limits: RequestLimits) -> int:
    prompt, asked, most = token_count(request.prompt_ids), request.sampling.max_tokens, limits.max_model_len
    if asked is not None and prompt + asked > most:
        raise InvalidRequestError(
            f"prompt ({prompt} tokens) plus max_tokens ({asked}) exceeds max_model_len ({most})", "max_tokens"
        )
    if asked is not None:
        return asked
    if request.phase is not Phase.CONTEXT_ONLY:
        # The last token's K and V are never computed, so one more token than the cache holds can be made.
        most = min(most, limits.num_blocks * limits.block_size + 1)
    if prompt >= most:
        raise InvalidRequestError(f"prompt ({prompt} tokens) leaves no room for output in {most} tokens", "prompt")
    if request.sampling.min_tokens > most - prompt:
        raise InvalidRequestError(
            f"prompt ({prompt} tokens) plus min_tokens ({request.sampling.min_tokens}) exceeds {most} tokens",
            "min_tokens",
        )
    return most - prompt


def _check_cache(request: GenerationRequest, max_tokens: int, limits: RequestLimits) -> None:
    """A sequence that runs alone must fit the cache to its last token; a context_only one to its first."""
    prompt = token_count(request.prompt_ids)
    positions = prompt + max_tokens - 1
    if request.phase is Phase.CONTEXT_ONLY:
        positions = prompt + token_count(request.generated_ids)
    capacity = limits.num_blocks * limits.block_size
    if positions > capacity:
        raise InvalidRequestError(
            f"prompt ({prompt} tokens) and output need {positions} tokens of KV cache, which has {capacity}", "prompt"
        )


def _check_handover(request: GenerationRequest, block_size: int) -> None:
    """The request's own tokens and what context_phase_params say of them must agree."""
    params = request.context_phase_params
    assert params is not None  # noqa: S101 - `GenerationRequest` makes sure
    prompt, first = token_count(request.prompt_ids), params.first_token_ids
    if params.prompt_tokens != prompt:
        raise InvalidRequestError(
            f"prompt has {prompt} tokens, context_phase_params say {params.prompt_tokens}", "context_phase_params"
        )
    if not first or not request.generated_ids.endswith(first):
        raise InvalidRequestError(
            f"generated_ids must end with the first tokens of context_phase_params, {unpack_tokens(first)}",
            "generated_ids",
        )
    computed = prompt + token_count(request.generated_ids) - token_count(first)
    blocks = -(-computed // block_size)
    if params.handle.blocks != blocks:
        raise InvalidRequestError(
            f"{computed} handed-over tokens fill {blocks} blocks, the handle has {params.handle.blocks}",
            "context_phase_params",
        )
