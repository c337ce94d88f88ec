"""The CPU path: single tokens through compiled loops over the blocks in place, chunks through matrix products."""

import numpy as np
import torch

from twostroke.engine.attention.chunks import ChunkAttention
from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, StepAttention
from twostroke.engine.attention.cpu_kernels import make_attend_kernel, make_write_kernel
from twostroke.engine.compiled_numbers import Array, as_array
from twostroke.engine.sharing import Team

_NO_WINDOW = 1 << 62


class CpuAttention:
    """Attention backend for a cache in CPU memory.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim], float32 or bfloat16, contiguous.
        heads: Query heads of the model.
        threads: Threads that share the single tokens of a step.
    """

    def __init__(self, cache: torch.Tensor, heads: int, threads: int) -> None:
        _, kv_heads, layers, _, block_size, head_dim = cache.shape
        self.cache = cache
        self.kv_heads = kv_heads
        self.flat_cache = as_array(cache.view(-1))
        self.cache_array = as_array(cache)
        self.write = make_write_kernel()
        self.attend = make_attend_kernel(
            head_dim=head_dim,
            group=heads // kv_heads,
            block_size=block_size,
            kv_heads=kv_heads,
            layers=layers,
            bits=cache.dtype is torch.bfloat16,
        )
        self.team = Team(threads)

    def prepare(self, batch: AttentionBatch) -> StepAttention:
        """See `AttentionBackend`."""
        return _CpuStep(self, batch)


class _CpuStep:
    """One step over the cache of `backend`."""

    def __init__(self, backend: CpuAttention, batch: AttentionBatch) -> None:
        self._backend = backend
        self._slots = batch.slots.numpy()
        self._blocks = batch.blocks.numpy()
        self._first_block = batch.singles.first_block.numpy()
        self._lengths = batch.singles.lengths.numpy()
        self._tasks = len(self._lengths) * backend.kv_heads
        self._chunks = [(span, ChunkAttention(backend.cache, batch.blocks, span)) for span in batch.chunks]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """See `StepAttention`."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        self._backend.write(self._backend.cache_array, self._slots, as_array(key), as_array(value), layer)
        output = torch.empty_like(query)
        if self._tasks:
            self._attend_singles(layer, as_array(query), as_array(output), form)
        for span, chunk in self._chunks:
            own = slice(span.first_token, span.first_token + span.tokens)
            output[own] = chunk.attend(layer, query[own], key[own], value[own], form).transpose(0, 1)
        return output

    def _attend_singles(self, layer: int, query: Array, output: Array, form: AttentionForm) -> None:
        backend = self._backend
        window = _NO_WINDOW if form.window is None else form.window
        scale, softcap = np.float32(form.scale), np.float32(form.softcap or 0)

        def run(begin: int, end: int) -> None:
            backend.attend(
                backend.flat_cache,
                self._blocks,
                self._first_block,
                self._lengths,
                query,
                output,
                layer,
                scale,
                window,
                softcap,
                begin,
                end,
            )

        backend.team.share(self._tasks, run)
