"""The GPU path: Triton kernels over a cache in GPU memory.

`prepare` takes a step's tables from the host to the device; each layer then starts at most four kernels, however many
sequences the step has: the write, one for all single tokens and one that joins their splits, one for all chunks.
"""

import torch
import triton

from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, SingleTokens, StepAttention
from twostroke.engine.kernels.decode_attention import attend_singles
from twostroke.engine.kernels.prefill_attention import MAX_GROUP, attend_chunks, choose_tile_form, cut_into_tiles
from twostroke.engine.kernels.write_kv import write_kv
from twostroke.protocol.errors import ConfigError, ModelError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = range(8, 129)


class TritonAttention:
    """Attention backend for a cache in GPU memory; or in CPU memory, under Triton's interpreter.

    Args:
        cache: [block, kv_head, layer, 2, token, head_dim], contiguous.
        heads: Query heads of the model.

    Raises:
        ConfigError: The kernels do not take the cache's device, dtype or block size.
        ModelError: They do not take the model's heads.
    """

    def __init__(self, cache: torch.Tensor, heads: int) -> None:
        _check(cache, heads)
        self.cache = cache
        self.heads = heads
        group = heads // cache.shape[1]
        self.tile_tokens = choose_tile_form(cache.shape[5], cache.dtype).rows // group

    def prepare(self, batch: AttentionBatch) -> StepAttention:
        """See `AttentionBackend`."""
        return _GpuStep(self, batch)


class _GpuStep:
    """One step over the cache of `backend`."""

    def __init__(self, backend: TritonAttention, batch: AttentionBatch) -> None:
        device = backend.cache.device
        self._backend = backend
        self._longest = int(batch.singles.lengths.max()) if len(batch.singles.lengths) else 0
        self._slots = batch.slots.to(device)
        self._blocks = batch.blocks.to(device)
        self._singles = SingleTokens(batch.singles.first_block.to(device), batch.singles.lengths.to(device))
        self._tiles = cut_into_tiles(batch.chunks, backend.tile_tokens).to(device)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """See `StepAttention`."""
        cache = self._backend.cache
        self._check("query", query, self._backend.heads)
        self._check("key", key, cache.shape[1])
        self._check("value", value, cache.shape[1])
        write_kv(cache, layer, key, value, self._slots)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        singles = len(self._singles.lengths)
        attend_singles(
            output[:singles], query[:singles], cache, layer, self._blocks, self._singles, self._longest, form
        )
        attend_chunks(output, query, cache, layer, self._blocks, self._tiles, form)
        return output

    def _check(self, name: str, tensor: torch.Tensor, heads: int) -> None:
        """A kernel reads whatever lies at the addresses it is given: so it is given nothing that does not fit."""
        cache = self._backend.cache
        expected = (len(self._slots), heads, cache.shape[5])
        if tensor.shape != expected or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; this step needs {expected}, "
                "with contiguous elements in a head"
            )
        if tensor.device != cache.device or tensor.dtype != cache.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, the KV cache {cache.dtype} on {cache.device}; they must "
                "agree"
            )


def _check(cache: torch.Tensor, heads: int) -> None:
    _, kv_heads, _, _, block_size, head_dim = cache.shape
    if cache.device.type != "cuda" and not (cache.device.type == "cpu" and triton.knobs.runtime.interpret):
        raise ConfigError(
            f"the KV cache lies on {cache.device}, and GPU attention needs it on a CUDA device (or, in tests, on the "
            "CPU with TRITON_INTERPRET=1)"
        )
    if cache.dtype not in DTYPES:
        raise ConfigError(f"model.dtype: {cache.dtype} has no GPU attention; set one of {_names(DTYPES)}")
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"kv_cache.block_size: {block_size} has no GPU attention; set {BLOCK_SIZES.start} to {BLOCK_SIZES.stop - 1}"
        )
    if head_dim not in HEAD_DIMS:
        raise ModelError(f"heads of {head_dim} elements have no GPU attention; supported are {_names(HEAD_DIMS)}")
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ModelError(
            f"{heads} query heads over {kv_heads} KV heads have no GPU attention; supported are whole multiples up to "
            f"{MAX_GROUP}"
        )
    if not cache.is_contiguous():
        raise ConfigError(f"the KV cache has strides {cache.stride()}; GPU attention needs it contiguous")


def _names(values: tuple[object, ...]) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in values)
