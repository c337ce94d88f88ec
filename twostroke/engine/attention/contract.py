"""What an attention backend promises to the model runner.

A step packs the tokens of all its slices into one row. Short slices come first, and each of their tokens attends by
itself (`SingleTokens`); long slices follow as whole chunks (`ChunkSpan`), whose attention is a matrix product. A
backend prepares a step once, and the result is then called once a layer:

    backend.prepare(batch) -> attend;   attend(layer, query, key, value, form) -> output      (for each layer)

`attend` writes the new K and V into their slots first, then lets each token see the cache up to and including itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How a layer attends, beyond being causal.

    Attributes:
        scale: Factor on the dot products.
        window: A token sees itself and the `window - 1` tokens before it; None sees all.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """Tokens `0 .. n` of the step, each attending by itself.

    Attributes:
        first_block: int64 [n]: where in `AttentionBatch.blocks` the token's block table starts.
        lengths: int64 [n]: tokens that it may see, itself included (its position + 1).
    """

    first_block: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Consecutive tokens of one sequence that attend as one matrix product.

    Attributes:
        first_token: Index of its first token in the step.
        tokens: How many.
        start: Position of the first token in its sequence.
        first_block: Where in `AttentionBatch.blocks` its block table starts.
    """

    first_token: int
    tokens: int
    start: int
    first_block: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a step's tokens lie in the cache and what they may see.

    Attributes:
        slots: int64 [tokens]: `block * block_size + offset` of each token's own K and V.
        blocks: int64 [sum of table lengths]: the block tables of all slices, one after another.
        singles: The first tokens of the step.
        chunks: The rest.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    singles: SingleTokens
    chunks: Sequence[ChunkSpan]


class StepAttention(Protocol):
    """Attention of one prepared step; called once a layer."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """Write K and V of all tokens, then attend.

        Args:
            layer: Layer of the cache.
            query: [tokens, heads, head_dim], the cache's dtype.
            key: [tokens, kv_heads, head_dim].
            value: As `key`.
            form: How this layer attends.

        Returns:
            [tokens, heads, head_dim], the dtype of `query`.
        """
        ...


class AttentionBackend(Protocol):
    """Makes step attention over one KV cache."""

    def prepare(self, batch: AttentionBatch) -> StepAttention:
        """Do once a step what all layers share."""
        ...
