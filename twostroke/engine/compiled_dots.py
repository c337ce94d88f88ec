"""Dot products in vector registers: four vectors of one array with up to three of another, at once.

No loop in the compiler's Python subset keeps 4 x 3 sums in registers, so this one is built from the compiler's own
instructions. The first array may hold bfloat16 bits, which are widened in a register, once for all three.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has no stubs
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

OUTPUTS = 4
"""Vectors of the first array that are taken together."""
LANES = 8
"""Elements of a register; lengths must be a multiple of it."""

_tools: Any = cgutils  # without types
_FLOAT, _HALF, _WORD, _INDEX = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _HALVES, _WORDS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _HALF, _WORD))
_FOUR_FLOATS = ir.VectorType(_FLOAT, OUTPUTS)


def _dots(rows: int) -> Any:
    """`dots(weights, first_weight, inputs, first_input, results, first_result, length, stride)`.

    `results[first_result + r * stride + n]` becomes the dot product of `length` elements of `weights` from
    `first_weight + n * length` on with those of `inputs` from `first_input + r * length` on, for `n` up to `OUTPUTS`
    and `r` up to `rows`. All arrays are float32 and have one dimension; `weights` may be bfloat16 bits (uint16). The
    `OUTPUTS` vectors after those read are fetched into the processor's cache.
    """

    def typed(
        _context: Any,
        weights: Any,
        _first_weight: Any,
        inputs: Any,
        _first_input: Any,
        results: Any,
        _first_result: Any,
        _length: Any,
        _stride: Any,
    ) -> Any:
        index = types.intp
        signature = types.void(weights, index, inputs, index, results, index, index, index)
        return signature, lambda context, builder, found, values: _build_dots(context, builder, found, values, rows)

    return typed


def _build_dots(context: Any, builder: Any, signature: Any, values: Any, rows: int) -> Any:
    """The instructions of one `dots` (see `_dots`)."""
    weights, first_weight, inputs, first_input, results, first_result, length, stride = values

    def start(place: int, array: Any, first: Any) -> Any:
        data = context.make_array(signature.args[place])(context, builder, array).data
        return builder.gep(data, [first])

    weight, source, target = (
        start(0, weights, first_weight),
        start(2, inputs, first_input),
        start(4, results, first_result),
    )
    widens = signature.args[0].dtype == types.uint16
    before = builder.block
    loop, after = builder.append_basic_block("dots"), builder.append_basic_block("dots_end")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_INDEX)
    at.add_incoming(_INDEX(0), before)
    sums = [builder.phi(_FLOATS) for _ in range(rows * OUTPUTS)]
    for one in sums:
        one.add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), before)
    multiply_add = _tools.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
    )

    def load(pointer: Any, row: int, kind: Any, align: int) -> Any:
        place = builder.add(at, builder.mul(length, _INDEX(row)))
        return builder.load(builder.bitcast(builder.gep(pointer, [place]), kind.as_pointer()), align=align)

    row_vectors = [load(source, row, _FLOATS, 4) for row in range(rows)]
    added = []
    for n in range(OUTPUTS):
        if widens:
            wide = builder.zext(load(weight, n, _HALVES, 2), _WORDS)
            element = builder.bitcast(builder.shl(wide, ir.Constant(_WORDS, [16] * LANES)), _FLOATS)
        else:
            element = load(weight, n, _FLOATS, 4)
        added += [builder.call(multiply_add, [element, row_vectors[row], sums[n * rows + row]]) for row in range(rows)]
    ahead = builder.gep(weight, [builder.mul(builder.add(at, length), _INDEX(OUTPUTS))])
    _fetch(builder, ahead)
    following = builder.add(at, _INDEX(LANES))
    builder.cbranch(builder.icmp_signed("<", following, length), loop, after)
    at.add_incoming(following, loop)
    for one, new in zip(sums, added, strict=True):
        one.add_incoming(new, loop)
    builder.position_at_end(after)
    for row in range(rows):
        four = _sum_lanes(builder, [added[n * rows + row] for n in range(OUTPUTS)])
        place = builder.gep(target, [builder.mul(stride, _INDEX(row))])
        builder.store(four, builder.bitcast(place, _FOUR_FLOATS.as_pointer()), align=4)
    return context.get_dummy_value()


def _fetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at `address`."""
    pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), signature)
    builder.call(fetch, [builder.bitcast(address, pointer), _WORD(0), _WORD(3), _WORD(1)])  # to read, nearest, data


def _sum_lanes(builder: Any, vectors: Any) -> Any:
    """A vector of four: the sum over the lanes of each of four vectors of eight."""

    def shuffle(first: Any, second: Any, lanes: Any) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))

    def pairwise(first: Any, second: Any) -> Any:
        """Sums of neighbours, alternating in runs of two between both vectors, as the processor's own does it."""
        even = shuffle(first, second, [0, 2, 8, 10, 4, 6, 12, 14])
        return builder.fadd(even, shuffle(first, second, [1, 3, 9, 11, 5, 7, 13, 15]))

    halves = pairwise(pairwise(vectors[0], vectors[1]), pairwise(vectors[2], vectors[3]))
    return builder.fadd(shuffle(halves, halves, [0, 1, 2, 3]), shuffle(halves, halves, [4, 5, 6, 7]))


dots_of_1: Any = intrinsic(_dots(1))
dots_of_2: Any = intrinsic(_dots(2))
dots_of_3: Any = intrinsic(_dots(3))
