"""Linear layers of several experts (a mixture of experts) on tokens sorted by expert, in the products of a recipe.

Group e is rows offsets[e - 1] to offsets[e] of x (from 0 for the first): the tokens of expert e. Its output and gradients are
those of `training_linear` on its rows and w[e], with every scale of its own; nothing of a group reaches another one. The sum
over tokens (the weight gradient) runs over the group's rows followed by rows of zeros up to a multiple of `group_step`: zeros
change no maximum and add nothing. Rows from offsets[-1] on belong to no expert: whatever they hold, their outputs and
gradients are zero.

Stochastic operands draw their words as `operands` does, from the tensor of all groups: x (T, K), w (E, N, K), g (T, N), w.T
(E, K, N), and for sums over tokens g.T (N, P) and x.T (K, P), where columns are `padded_rows` = P rows: group after group,
each with its rows of zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, Namespace, check_plain, choice, float_input, namespace_of
from reference.formats.encode import random_bits
from reference.quantize.quantize import Quantized, quantize
from reference.training.linear import operand, product
from reference.training.recipe import PRODUCTS, Operand, Recipe, recipe_of

#: Rows of a group that tensor cores of 8-bit floats take at a time: 16 bytes.
STEP = 16


def grouped_linear(
    x: Array, w: Array, offsets: Array, recipe: str | Recipe, *, accumulation: str = "exact"
) -> Array:
    """y (T, N) in x's dtype: row t of group e is x[t] times w[e].T; zeros from row offsets[-1] on.

    x: (T, K) float32, bfloat16 or float16, NumPy, JAX or torch, sorted by expert; w: (E, N, K) of x's dtype; offsets: E
    integers that do not fall, the row after each group. accumulation: "exact" or "recipe", as in `training_linear`. Raises
    ValueError for shapes, offsets and names that do not fit, and where the recipe's blocks do not divide K or N; TypeError
    for other dtypes. Offsets are read: in JAX they are concrete.
    """
    recipe = recipe_of(recipe)
    ns, name, ends = _checked(x, w, offsets)
    pairs = grouped_operands("output", recipe, offsets, x=x, w=w)
    parts = [None if pair is None else product(*pair, recipe.output, name, accumulation) for pair in pairs]
    return _rows(ns, parts, ends, (ns.shape(x)[0], ns.shape(w)[1]), x, name)


def grouped_linear_vjp(
    g: Array, x: Array, w: Array, offsets: Array, recipe: str | Recipe, *, seed: int = 0, accumulation: str = "exact"
) -> tuple[Array, Array]:  # fmt: skip
    """(dx, dw) of `grouped_linear` for an output gradient g (T, N): (T, K) and (E, N, K) in x's dtype.

    dw of an expert without tokens is zero. seed: of the random bits, where the recipe rounds stochastically. Errors as in
    `grouped_linear`.
    """
    recipe = recipe_of(recipe)
    ns, name, ends = _checked(x, w, offsets)
    pairs = {
        which: grouped_operands(which, recipe, offsets, x=x, w=w, g=g, seed=seed) for which in PRODUCTS[1:]
    }
    dx, dw = (
        [None if pair is None else product(*pair, getattr(recipe, which), name, accumulation) for pair in result]
        for which, result in pairs.items()
    )  # fmt: skip
    nothing = _zeros(ns, ns.shape(w)[1:], x, name)
    stacked = ns.stack([nothing if part is None else part for part in dw], 0)
    return _rows(ns, dx, ends, ns.shape(x), x, name), stacked


def grouped_operands(
    which: str, recipe: str | Recipe, offsets: Array, *, x: Array = None, w: Array = None, g: Array = None, seed: int = 0
) -> list[tuple[Array | Quantized, Array | Quantized] | None]:  # fmt: skip
    """For each expert both operands of a product, the sum along the last axis of each; None for one without tokens.

    Arguments as in `operands`: x (T, K), w (E, N, K), g (T, N), those that the product needs.
    """
    choice(which, PRODUCTS, "product")
    recipe = recipe_of(recipe)
    record, first = getattr(recipe, which), 2 * PRODUCTS.index(which)
    ends = group_ends(offsets, None if w is None else w.shape[0], (g if x is None else x).shape[0])
    tensors = {"output": (x, w), "input_grad": (g, w), "weight_grad": (g, x)}[which]
    forward = {
        "output": (None, None),
        "input_grad": (None, recipe.output.b),
        "weight_grad": (None, recipe.output.a),
    }[which]
    result: list[tuple[Any, Any] | None] = []
    for expert, (start, end) in enumerate(_ranges(ends)):
        pair = None if start == end else tuple(
            _operand(tensor, one, before, which, at, ends, expert, group_step(recipe), (seed, first + at))
            for at, (tensor, one, before) in enumerate(zip(tensors, (record.a, record.b), forward, strict=True))
        )  # fmt: skip
        result.append(pair)  # type: ignore[arg-type]
    return result


def group_step(recipe: str | Recipe) -> int:
    """What the rows of a group are filled up to a multiple of in sums over tokens; 1 where nothing asks for it."""
    product = recipe_of(recipe).weight_grad
    return max(_step(product.a), _step(product.b))


def padded_rows(rows: int, experts: int, step: int) -> int:
    """The most rows that a split of `rows` rows into groups has when each group is filled up to a multiple of `step`."""
    return (rows + min(rows, experts) * (step - 1)) // step * step


def group_ends(offsets: Array, experts: int | None, rows: int) -> tuple[int, ...]:
    """The offsets as integers; ValueError unless there is one for each expert and they rise from 0 to at most `rows`."""
    check_plain(offsets)
    ends = np.asarray(offsets)
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or (experts is not None and len(ends) != experts):
        raise ValueError(
            f"offsets are one integer for each of {experts} experts, got {ends.dtype} of shape {ends.shape}"
        )
    result = tuple(int(end) for end in ends)
    if any(start > end for start, end in _ranges(result)) or (result and result[-1] > rows):
        raise ValueError(
            f"offsets do not fall and end within the {rows} rows, got {list(result)}; they are cumulative ends"
        )
    return result


def _operand(
    tensor: Array, record: Operand, forward: Operand | None, which: str, at: int, ends: tuple[int, ...], expert: int, step: int,
    draw: tuple[int, int],
) -> Array | Quantized:  # fmt: skip
    """One operand of one expert. at: 0 for a, 1 for b. draw: seed and stream."""
    ns = namespace_of(tensor)
    shape: tuple[int, ...] = ns.shape(tensor)
    drawn: tuple[int, ...]
    start, end = _ranges(ends)[expert]
    if which == "weight_grad":
        matrix = _padded(ns, tensor[start:end], step).swapaxes(0, 1)
        first = sum(_up(b - a, step) for a, b in _ranges(ends)[:expert])
        drawn = (shape[1], padded_rows(shape[0], len(ends), step))
        part: Any = (slice(None), slice(first, first + _up(end - start, step)))
    elif at:
        matrix = tensor[expert] if which == "output" else tensor[expert].swapaxes(0, 1)
        drawn, part = (shape[0], *ns.shape(matrix)), expert
    else:
        matrix, drawn, part = tensor[start:end], shape, slice(start, end)
    prepared = operand(matrix, replace(record, scheme=None), forward)
    if record.scheme is None:
        return prepared
    words = None
    if record.scheme.rounding == "stochastic":
        words = ns.constant(
            np.ascontiguousarray(random_bits(drawn, seed=draw[0], stream=draw[1])[part]), tensor
        )
    return quantize(prepared, record.scheme, random_bits=words)


def _step(record: Operand) -> int:
    """What one operand's length along the sum is a multiple of."""
    if record.scheme is None:
        return max(record.hadamard, 1)
    block = record.scheme.scale.block
    inner = block[1] if isinstance(block, tuple) else block if isinstance(block, int) and block > 0 else STEP
    return max(inner, record.hadamard, STEP)


def _ranges(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    """First row of each group, and the row after it."""
    return list(zip((0, *ends[:-1]), ends, strict=True))


def _up(rows: int, step: int) -> int:
    return -(-rows // step) * step


def _padded(ns: Namespace, rows: Array, step: int) -> Array:
    """A group's rows followed by rows of zeros up to a multiple of `step`."""
    count, width = ns.shape(rows)
    more = -count % step
    return ns.concatenate([rows, _zeros(ns, (more, width), rows, ns.dtype_name(rows))], 0) if more else rows


def _rows(
    ns: Namespace, parts: list[Any], ends: tuple[int, ...], shape: tuple[int, ...], like: Array, name: str
) -> Array:
    """The groups' results one after the other, and zeros up to `shape`."""
    tail = _zeros(ns, (shape[0] - (ends[-1] if ends else 0), *shape[1:]), like, name)
    return ns.concatenate([*(part for part in parts if part is not None), tail], 0)


def _zeros(ns: Namespace, shape: tuple[int, ...], like: Array, name: str) -> Array:
    return ns.astype(ns.full(shape, 0, "float32", like), name)


def _checked(x: Array, w: Array, offsets: Array) -> tuple[Namespace, str, tuple[int, ...]]:
    """Library and dtype of x, and the groups' ends; errors where something does not fit."""
    ns, x, name = float_input(x, "grouped_linear")
    shape, weight = ns.shape(x), tuple(w.shape)
    if len(shape) != 2 or len(weight) != 3 or shape[1] != weight[2]:
        raise ValueError(
            f"grouped_linear takes x (T, K) and w (E, N, K), got shapes {shape} and {weight}; their last axes are the same"
        )
    if namespace_of(w).dtype_name(w) != name:
        raise TypeError(
            f"x and w have one dtype, got {name} and {namespace_of(w).dtype_name(w)}; cast one of them"
        )
    return ns, name, group_ends(offsets, weight[0], shape[0])


__all__ = [
    "group_ends",
    "group_step",
    "grouped_linear",
    "grouped_linear_vjp",
    "grouped_operands",
    "padded_rows",
]
