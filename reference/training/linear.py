"""The linear layer of a recipe: y = x w.T + bias, and the gradients of x, w and bias, from `quantize` and `matmul`.

`operands` gives what the tensor cores are given, bit for bit; `training_linear` and `training_linear_vjp` their products, in
one of two accumulations: "exact" rounds once, "recipe" models the tensor core as each product's own accumulation asks.

What is not finite in x, w or g makes its block NaN. So it reaches every element of y, dx and dw that it would reach in exact
arithmetic, which become NaN or infinite, and with one scale for many rows others too.

`unsupported_reason` says which shapes a recipe takes: every operand's blocks divide its matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from reference.arrays.namespace import Array, choice, float_input, namespace_of
from reference.formats.encode import random_bits
from reference.layers.hadamard import hadamard
from reference.matmul.linear import transposed
from reference.matmul.matmul import matmul
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.training.recipe import PRODUCTS, Operand, Product, Recipe, recipe_of

#: Arguments of `matmul` for each accumulation of a product of quantized operands.
TIERS: dict[str, dict[str, Any]] = {
    "fast": {"accumulation": "hopper_fp8"},
    "precise": {"accumulation": "hopper_fp8", "promote": 128},
}
#: Of operands in 16 bits: the steps and aligned bits of the tensor core for those, whose accumulator is float32.
TIER_16: dict[str, Any] = {"accumulation": "hopper_fp8", "k_step": 16, "frac_bits": 25}
#: Of others: float32 sums of exact blocks.
TIER_32: dict[str, Any] = {"accumulation": "blocked"}


def training_linear(
    x: Array, w: Array, recipe: str | Recipe, bias: Array | None = None, *, accumulation: str = "exact"
) -> Array:
    """x (..., K) times w.T (K, N) plus bias (N) in x's dtype: (..., N).

    x: float32, bfloat16 or float16, NumPy, JAX or torch; w: (N, K) of x's dtype, bias of one of these. accumulation: "exact" or
    "recipe". Raises ValueError for shapes that do not multiply or that the recipe's blocks do not divide
    (`unsupported_reason`), and for unknown names; TypeError for other dtypes and under JAX tracing.
    """
    recipe = recipe_of(recipe)
    name, shape = _checked(x, w, recipe, ("output",))
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight asks for {(w.shape[0],)}")
    a, b = operands("output", recipe, x=x.reshape((-1, shape[-1])), w=w)
    y = product(a, b, recipe.output, name, accumulation, bias)
    return y.reshape((*shape[:-1], w.shape[0]))


def training_linear_vjp(
    g: Array, x: Array, w: Array, recipe: str | Recipe, *, seed: int = 0, accumulation: str = "exact"
) -> tuple[Array, Array, Array]:
    """(dx, dw, dbias) of `training_linear` for an output gradient g (..., N), in x's dtype.

    g: of x's dtype. dbias (N): the exact sum of g, rounded once. seed: of the random bits where the recipe rounds
    stochastically, another one for each layer and step. Errors as in `training_linear`; the rows of x count here.
    """
    recipe = recipe_of(recipe)
    name, shape = _checked(x, w, recipe, PRODUCTS)
    _check_gradient(g, name, (*shape[:-1], w.shape[0]))
    tensors = {"x": x.reshape((-1, shape[-1])), "w": w, "g": g.reshape((-1, w.shape[0]))}
    dx, dw = (
        product(*operands(which, recipe, **tensors, seed=seed), record, name, accumulation)
        for which, record in (("input_grad", recipe.input_grad), ("weight_grad", recipe.weight_grad))
    )
    ones = _ones(tensors["g"])
    return dx.reshape(shape), dw, matmul(ones, tensors["g"], out_dtype=name).reshape((-1,))


def operands(
    which: str, recipe: str | Recipe, *, x: Array = None, w: Array = None, g: Array = None, seed: int = 0
) -> tuple[Array | Quantized, Array | Quantized]:
    """Both operands of a product ("output", "input_grad", "weight_grad"), the sum along the last axis of each.

    x (M, K), w (N, K), g (M, N): those that the product needs. Stochastic operands draw word i of stream s of
    `random_bits(seed=seed)` for element i, s their place among x, w, g, w.T, g.T and x.T.
    """
    choice(which, PRODUCTS, "product")
    recipe = recipe_of(recipe)
    record: Product = getattr(recipe, which)
    tensors = {"output": (x, w), "input_grad": (g, _T(w)), "weight_grad": (_T(g), _T(x))}[which]
    forward = {
        "output": (None, None),
        "input_grad": (None, recipe.output.b),
        "weight_grad": (None, recipe.output.a),
    }[which]
    first = 2 * PRODUCTS.index(which)
    a, b = (
        operand(t, one, before, seed=seed, stream=first + at)
        for at, (t, one, before) in enumerate(zip(tensors, (record.a, record.b), forward, strict=True))
    )
    return a, b


def operand(
    x: Array, record: Operand, forward: Operand | None = None, *, seed: int = 0, stream: int = 0
) -> Array | Quantized:
    """A matrix as one operand of a product. forward: the output's operand of the transposed matrix, where codes come from.

    A matrix mixed by a Hadamard transform is rounded to its dtype before it is quantized.
    """
    if record.source == "output" and forward is not None and forward.scheme is not None:
        _, _, name = float_input(x, "operand")
        x = _T(dequantize(quantize(_T(x), forward.scheme), name))
    if record.hadamard:
        x = hadamard(x, record.hadamard)
    if record.scheme is None:
        return x
    words = None
    if record.is_stochastic:
        ns = namespace_of(x)
        words = ns.constant(random_bits(tuple(ns.shape(x)), seed=seed, stream=stream), x)
    return quantize(x, record.scheme, random_bits=words)


def product(
    a: Array | Quantized, b: Array | Quantized, record: Product, dtype: str, accumulation: str = "exact",
    bias: Array | None = None,
) -> Array:  # fmt: skip
    """a @ b.T plus bias, in `dtype`."""
    choice(accumulation, ("exact", "recipe"), "accumulation")
    tier = {} if accumulation == "exact" else _tier(a, b, record)
    return matmul(a, _transposed(b), out_dtype=dtype, bias=bias, **tier)


def _tier(a: Array | Quantized, b: Array | Quantized, record: Product) -> dict[str, Any]:
    """Arguments of `matmul` for the recipe's accumulation."""
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return TIERS[record.accumulation]
    names = tuple("" if isinstance(x, Quantized) else namespace_of(x).dtype_name(x) for x in (a, b))
    half = all(name in ("bfloat16", "float16") for name in names)
    return {**TIER_16, "operand_formats": names} if half else TIER_32


def _transposed(b: Array | Quantized) -> Any:
    return transposed(b) if isinstance(b, Quantized) else _T(b)


def _T(x: Array | None) -> Any:
    """The transposed matrix."""
    return None if x is None else x.swapaxes(0, 1)


def _ones(g: Array) -> Array:
    """A row of ones that sums the rows of g."""
    ns = namespace_of(g)
    return ns.astype(ns.full((1, ns.shape(g)[0]), 1, "float32", g), ns.dtype_name(g))


def _checked(x: Array, w: Array, recipe: Recipe, products: tuple[str, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of x; ValueError where w does not fit, or the recipe's blocks do not."""
    ns, x, name = float_input(x, "training_linear")
    shape, weight = tuple(ns.shape(x)), tuple(w.shape)
    if not shape or len(weight) != 2 or shape[-1] != weight[1]:
        raise ValueError(
            f"training_linear takes x (..., K) and w (N, K), got shapes {shape} and {weight}; their last axes are the same"
        )
    if namespace_of(w).dtype_name(w) != name:
        raise TypeError(
            f"x and w have one dtype, got {name} and {namespace_of(w).dtype_name(w)}; cast one of them"
        )
    reason = unsupported_reason(recipe, shape, weight, products=products)
    if reason is not None:
        raise ValueError(f"{reason}; pad it, or use another recipe")
    return name, shape


def _check_gradient(g: Array, name: str, shape: tuple[int, ...]) -> None:
    """ValueError or TypeError unless g is like the output."""
    _, g, given = float_input(g, "training_linear_vjp")
    if tuple(g.shape) != shape:
        raise ValueError(f"g has the shape of the output, {shape}, got {tuple(g.shape)}")
    if given != name:
        raise TypeError(f"g has the dtype of x, {name}, got {given}; cast it")


MEANINGS = {
    "K": "input features",
    "N": "output features",
    "M": "rows of the input, all its axes but the last together",
}
#: (rows, sum) of the operands a and b of each product.
AXES = {
    "output": (("M", "K"), ("N", "K")),
    "input_grad": (("M", "N"), ("K", "N")),
    "weight_grad": (("N", "M"), ("K", "M")),
}


def unsupported_reason(
    recipe: str | Recipe,
    shape_x: Sequence[int] | None,
    shape_w: Sequence[int],
    *,
    products: Sequence[str] = PRODUCTS,
    multiple: int = 1,
) -> str | None:
    """Why a linear layer of these shapes cannot run by a recipe, in words, or None where it can.

    shape_x: (..., K) of the input; None where the number of rows M is not known yet, which then is not looked at. shape_w:
    (N, K) of the weight. products: which of "output", "input_grad" and "weight_grad" are wanted; M counts in the last alone,
    whose sum runs over it. multiple: what a device asks of every sum over quantized operands besides (16 for FP8 tensor cores).

    Rows of zeros below x and g change no other row and add zeros to the weight gradient, so x may be padded to a multiple
    (elements then draw other random bits). Nothing is padded here.
    """
    recipe = recipe_of(recipe)
    lengths = {"N": shape_w[0], "K": shape_w[1]}
    if shape_x is not None:
        lengths["M"] = _product_of(shape_x[:-1])
    wanted = {dim: multiple_of(recipe, dim, products=products, multiple=multiple) for dim in lengths}
    wrong = [
        f"{dim} ({MEANINGS[dim]}) is {lengths[dim]}, not a multiple of {size}"
        for dim, size in wanted.items()
        if lengths[dim] % size
    ]
    return f"recipe {recipe.name}: {'; '.join(wrong)}" if wrong else None


def multiple_of(
    recipe: str | Recipe, dim: str, *, products: Sequence[str] = PRODUCTS, multiple: int = 1
) -> int:
    """What the length of "M", "N" or "K" has to be a multiple of; arguments as in `unsupported_reason`."""
    choice(dim, tuple(MEANINGS), "dim")
    recipe = recipe_of(recipe)
    result = 1
    for which in products:
        record: Product = getattr(recipe, which)
        for operand, (rows, along) in zip((record.a, record.b), AXES[which], strict=True):
            of_rows, of_sum = _blocks(operand)
            quantized = multiple if operand.scheme is not None else 1
            result = lcm(result, of_rows if rows == dim else 1, lcm(of_sum, quantized) if along == dim else 1)
    return result


def _blocks(operand: Operand) -> tuple[int, int]:
    """What divides an operand's rows, and its last axis."""
    mixed = max(operand.hadamard, 1)
    if operand.scheme is None or operand.scheme.scale.partial:
        return 1, mixed
    block = operand.scheme.scale.block
    if isinstance(block, tuple):
        return block[0], lcm(block[1], mixed)
    return 1, lcm(block, mixed) if isinstance(block, int) and block > 0 else mixed


def _product_of(lengths: Sequence[int]) -> int:
    rows = 1
    for length in lengths:
        rows *= length
    return rows
