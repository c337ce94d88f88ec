"""Decode steps as captured graphs, at padded batch sizes.

A step in which every sequence computes one token is copied into static buffers, padded to the next captured size, and
replayed; any other step runs as usual. Padded rows see no token and are written nowhere, and their logits are cut off:

    numbers  [tokens | positions | slots | lengths | first blocks | block tables]     one int64 buffer, one upload
             each of the first five holds `most` rows; a graph of size n reads the first n of each
"""

from collections.abc import Callable, Sequence

import torch

from twostroke.engine.attention.contract import AttentionBackend, AttentionBatch, SingleTokens
from twostroke.engine.device.contract import CapturedStep, GraphDevice
from twostroke.engine.library_attention import StepForward
from twostroke.engine.packing import PackedStep

_FIELDS = 5
_NO_SLOT = -1


def padded_sizes(most: int) -> list[int]:
    """Batch sizes to capture: powers of two and the halves between, so that at most a third is padding; ends at `most`.

    Memory for all of them is shared, so a size costs its capture at start (a fraction of a second) and little else.
    """
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, min(size * 3 // 2, most)}
        size *= 2
    return sorted(sizes)


class DecodeGraphs:
    """The captured steps of one model on one device.

    Args:
        device: Where they run.
        forward: The model.
        attention: Attention over the cache; must take padded rows (slot -1, length 0).
        static: Whatever else the model reads and writes: its weights and the cache.
        most: Sequences in a batch at most.
        max_model_len: Positions of a sequence at most.
        block_size: Tokens of a block.
    """

    def __init__(  # noqa: PLR0917 - one part each; a runner makes them once
        self,
        device: GraphDevice,
        forward: StepForward,
        attention: AttentionBackend,
        static: Sequence[torch.Tensor],
        most: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._most = most
        self._longest = max_model_len
        table_capacity = most * -(-max_model_len // block_size)
        self._staging = torch.zeros(_FIELDS * most + table_capacity, dtype=torch.int64)
        self._numbers = torch.zeros_like(self._staging, device=device.torch_device)
        self._kept = torch.arange(most, device=device.torch_device)
        self._forward = forward
        self._attention = attention
        everything = [*static, self._numbers, self._kept]
        self._clear()
        # The largest first: the others then fit into the memory that it took.
        self._graphs: dict[int, CapturedStep] = {
            size: device.capture(self._step_of(size), everything) for size in reversed(padded_sizes(most))
        }

    def fits(self, step: PackedStep) -> bool:
        """Whether each slice of `step` is one token that is sampled, and there are not too many."""
        tokens = step.token_ids.shape[1]
        return (
            tokens == len(step.sampled) and not step.attention.chunks and not step.scored and 0 < tokens <= self._most
        )

    def run(self, step: PackedStep) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a step that fits; valid until the next call."""
        tokens = step.token_ids.shape[1]
        size = min(size for size in self._graphs if size >= tokens)
        self._stage(step, tokens, size)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:tokens]

    def _stage(self, step: PackedStep, tokens: int, size: int) -> None:
        """Upload the step's numbers, and padding up to `size`."""
        singles = step.attention.singles
        columns = (step.token_ids[0], step.positions[0], step.attention.slots, singles.lengths, singles.first_block)
        fields = self._staging[: _FIELDS * self._most].view(_FIELDS, self._most)
        for field, column, padding in zip(fields, columns, (0, 0, _NO_SLOT, 0, 0), strict=True):
            field[:tokens] = column
            field[tokens:size] = padding
        used = _FIELDS * self._most + len(step.attention.blocks)
        self._staging[_FIELDS * self._most : used] = step.attention.blocks
        self._numbers[:used].copy_(self._staging[:used])

    def _clear(self) -> None:
        """Padding everywhere, but lengths of the longest sequence: attention plans for what it sees at preparation."""
        fields = self._numbers[: _FIELDS * self._most].view(_FIELDS, self._most)
        fields[2] = _NO_SLOT
        fields[3] = self._longest

    def _step_of(self, size: int) -> Callable[[], torch.Tensor]:
        """The step to capture for `size` rows."""
        fields = self._numbers[: _FIELDS * self._most].view(_FIELDS, self._most)[:, :size]
        token_ids, positions, slots, lengths, first_block = fields
        batch = AttentionBatch(slots, self._numbers[_FIELDS * self._most :], SingleTokens(first_block, lengths), [])
        step = PackedStep(token_ids[None], positions[None], self._kept[:size], [], [], batch)
        attend = self._attention.prepare(batch)
        return lambda: self._forward(step, attend)
