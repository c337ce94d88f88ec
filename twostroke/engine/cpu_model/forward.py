"""One step of a plain decoder: the library's weights, compiled loops between the matrix products.

    rows = embed(tokens)
    each layer:  norm -> joined -> rotate -> attend -> output,  sum and norm -> gate_up -> gate -> down
    kept rows:   sum and norm -> head -> logits

All memory between is made once a step and used by every layer. `library_attention.forward` is the way for all other
models, and the reference for this one.
"""

from collections.abc import Callable

import torch

from twostroke.engine.attention.contract import StepAttention
from twostroke.engine.compiled_numbers import Array, as_array
from twostroke.engine.cpu_model.plain_decoder import PlainDecoder, PlainLayer, Projection
from twostroke.engine.cpu_model.products import Product, ProductMaker, Rows, choose_products
from twostroke.engine.cpu_model.row_kernels import make_add_norm_kernel, make_gate_kernel, make_rotate_kernel
from twostroke.engine.packing import PackedStep
from twostroke.engine.sharing import Team

_ROWS_PER_PART = 16
"""Fewer rows than this are not worth waking a thread for."""


class CompiledDecoder:
    """Runs steps of one model; has the form of `library_attention.forward` without its module.

    Args:
        model: Its weights.
        dtype: Of the weights and of the cache.
        threads: Threads that share the compiled loops.
    """

    def __init__(self, model: PlainDecoder, dtype: torch.dtype, threads: int) -> None:
        self._model = model
        self._dtype = dtype
        self._team = Team(threads)
        products = choose_products(dtype, _projections(model), self._team)
        self._row_dtype = products.dtype
        bits, cache_bits = products.dtype is torch.bfloat16, dtype is torch.bfloat16
        self._add_norm = make_add_norm_kernel(bits=bits)
        self._gate = make_gate_kernel(bits=bits)
        self._rotate = make_rotate_kernel(
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            norms=model.layers[0].head_norms is not None,
            bits=bits,
            cache_bits=cache_bits,
        )
        self._layers = [_Layer(layer, products) for layer in model.layers]
        self._norm = as_array(model.norm)
        self._head = products.make(model.head)

    def __call__(self, step: PackedStep, attend: StepAttention) -> torch.Tensor:
        """Logits [kept, vocabulary] of the tokens in `step.kept`."""
        memory = _StepMemory(self._model, step, self._row_dtype, self._dtype)
        for index, layer in enumerate(self._layers):
            self._attention(index, layer, memory, attend)
            self._inner(layer, memory)
        kept = _Kept(memory, step.kept)
        self._sum_and_norm(kept.residual, kept.added, self._norm, kept.normed)
        logits = Rows.empty(len(step.kept), self._model.head.weight.shape[0], self._row_dtype)
        if len(step.kept):
            self._head(kept.normed, logits)
        return logits.tensor

    def _attention(self, index: int, layer: "_Layer", memory: "_StepMemory", attend: StepAttention) -> None:
        model = self._model
        self._sum_and_norm(memory.residual, memory.added, layer.input_norm, memory.normed)
        layer.joined(memory.normed, memory.joined)
        self._share(
            memory.tokens,
            lambda begin, end: self._rotate(
                memory.joined.array,
                memory.cosines,
                memory.sines,
                layer.head_norms,
                model.epsilon,
                memory.query.array,
                memory.key.array,
                memory.value.array,
                begin,
                end,
            ),
        )
        heads = attend(index, memory.query_heads, memory.key_heads, memory.value_heads, layer.form)
        memory.attended.tensor.copy_(heads.view(memory.tokens, -1))
        layer.output(memory.attended, memory.added)

    def _inner(self, layer: "_Layer", memory: "_StepMemory") -> None:
        self._sum_and_norm(memory.residual, memory.added, layer.inner_norm, memory.normed)
        layer.gate_up(memory.normed, memory.both)
        width = memory.gated.tensor.shape[1]
        self._share(
            memory.tokens, lambda begin, end: self._gate(memory.both.array, memory.gated.array, width, begin, end)
        )
        layer.down(memory.gated, memory.added)

    def _sum_and_norm(self, residual: Rows, added: Rows, weight: Array, normed: Rows) -> None:
        rows, width = residual.tensor.shape
        epsilon = self._model.epsilon
        self._share(
            rows,
            lambda begin, end: self._add_norm(
                residual.array, added.array, weight, epsilon, normed.array, width, begin, end
            ),
        )

    def _share(self, rows: int, run: Callable[[int, int], object]) -> None:
        if rows <= _ROWS_PER_PART:
            run(0, rows)
        else:
            self._team.share(rows, run)


class _Layer:
    """A layer's weights as the loops take them."""

    __slots__ = ("down", "form", "gate_up", "head_norms", "inner_norm", "input_norm", "joined", "output")

    def __init__(self, layer: PlainLayer, products: ProductMaker) -> None:
        norms = torch.ones(2, 1) if layer.head_norms is None else layer.head_norms
        self.input_norm, self.inner_norm = as_array(layer.input_norm), as_array(layer.inner_norm)
        self.head_norms = as_array(norms.view(-1))
        self.joined: Product = products.make(layer.joined)
        self.output: Product = products.make(layer.output)
        self.gate_up: Product = products.make(layer.gate_up)
        self.down: Product = products.make(layer.down)
        self.form = layer.form


class _StepMemory:
    """What the layers of one step share."""

    def __init__(self, model: PlainDecoder, step: PackedStep, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        embedded = model.embed(step.token_ids)
        cosines, sines = model.rotary(embedded, step.positions)
        self.tokens = tokens = embedded.shape[1]
        self.cosines, self.sines = (as_array(one[0].float().contiguous().view(-1)) for one in (cosines, sines))
        layer, hidden, head_dim = model.layers[0], embedded.shape[2], model.head_dim

        def rows(width: int, kind: torch.dtype = dtype) -> Rows:
            return Rows.empty(tokens, width, kind)

        self.residual = Rows(torch.zeros(tokens, hidden, dtype=dtype))
        self.added = Rows(embedded[0].to(dtype))  # the first sum makes it the residual
        self.normed = rows(hidden)
        self.joined = rows(layer.joined.weight.shape[0])
        self.query = rows(model.heads * head_dim, cache_dtype)
        self.key, self.value = (
            rows(model.kv_heads * head_dim, cache_dtype),
            rows(model.kv_heads * head_dim, cache_dtype),
        )
        self.query_heads, self.key_heads, self.value_heads = (
            one.tensor.view(tokens, -1, head_dim) for one in (self.query, self.key, self.value)
        )
        self.attended = rows(model.heads * head_dim)
        self.both, self.gated = rows(layer.gate_up.weight.shape[0]), rows(layer.down.weight.shape[1])


class _Kept:
    """The rows whose logits are wanted, after the last layer."""

    def __init__(self, memory: _StepMemory, kept: torch.Tensor) -> None:
        self.residual, self.added = Rows(memory.residual.tensor[kept]), Rows(memory.added.tensor[kept])
        self.normed = Rows(torch.empty_like(self.residual.tensor))


def _projections(model: PlainDecoder) -> list[Projection]:
    inside = [one for layer in model.layers for one in (layer.joined, layer.output, layer.gate_up, layer.down)]
    return [*inside, model.head]
