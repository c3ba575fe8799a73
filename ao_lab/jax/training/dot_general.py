"""`dot_general`: `jax.lax.dot_general` by a training recipe, forward and both gradients quantized.

    from functools import partial
    from ao_lab.jax.training import DotGeneral, dot_general

    y = dot_general(x, w, (((1,), (0,)), ((), ())), recipe="mxfp8")
    flax.linen.Dense(4096, dot_general=DotGeneral("mxfp8"))                    # also nnx.Linear
    flax.linen.Dense(4096, dot_general_cls=partial(DotGeneral, "mxfp8"))
    flax.linen.Dense(4096, dot_general=DotGeneral("nvfp4", seed=self.make_rng("rounding")))

The left operand is the input x, the right one the weight w (`weight="lhs"`: the other way round): with the axes of each in the
order batch, free, contracting, x is (M, K) and w (N, K), as in `reference.training.recipe`. `jnp.einsum` exchanges its operands
where its result does not begin with the axes of the left one: there `DotGeneral(recipe, weight="lhs")` is right, or
`ao_lab.jax.training.einsum`, which knows its operands. Contracting axes are flattened in the order in which they are
given. Each element of the batch axes is a product of its own, with scales of its own, as under `vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.jax.device import require_array
from ao_lab.jax.functions import dequantize
from ao_lab.jax.training.operands import (
    Factor,
    factor,
    missing_seed,
    operand,
    operands,
    product,
    transposed_factor,
    words_of,
)
from ao_lab.jax.training.random_words import seed_words
from reference import Quantized
from reference.arrays.errors import choice
from reference.arrays.jax_bridge import automatic, explicit_mesh
from reference.training.linear import unsupported_reason
from reference.training.recipe import PRODUCTS, Recipe, recipe_of

DTYPES = ("float32", "bfloat16", "float16")
Axes = tuple[int, ...]


@dataclass(frozen=True)
class DotGeneral:
    """`dot_general` with its recipe, for what calls its function like `jax.lax.dot_general` (flax, einsum).

    seed, weight: as in `dot_general`; the seed may be an array of the program that calls this.
    """

    recipe: str | Recipe
    seed: Any = None
    weight: str | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product; see `dot_general`."""
        return dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding, recipe=self.recipe,
            seed=self.seed, weight=self.weight,
        )  # fmt: skip


@dataclass(frozen=True)
class _Rule:
    """What a product does besides its arrays."""

    recipe: Recipe
    dtype: str
    precision: Any


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: str | Recipe,
    seed: Any = None,
    weight: str | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` of x (`lhs`) and w (`rhs`), its gradients too, by a recipe of `reference.training.RECIPES`.

    lhs, rhs: JAX arrays, both float32, bfloat16 or float16. dimension_numbers and the shape of the result: as in
    `jax.lax.dot_general`. precision: of products of operands that are not quantized. preferred_element_type: the dtype of the
    result, and of the gradient that comes back; by default that of the operands. seed: where the recipe rounds
    stochastically, another one for each layer and step: a JAX key, an integer or an array of one (`seed_words`). weight:
    "rhs" or "lhs", which of the operands is the weight; by default the right one. out_sharding: as in `jax.lax.dot_general`,
    under a mesh with explicit axes.

    The operands have the bits of `reference.training.linear.operands` under that seed; word i of a stream is for element i of
    all batches together, and a seed that `vmap` does not map is one for all. Sums are float32 (`ao_lab.jax.training.operands`).
    Kept for backward: w, and x or, where the recipe allows, its codes.

    First derivatives in reverse mode, under jit, vmap, scan and remat. Raises TypeError for other arrays, dtypes and seeds
    and for second derivatives, ValueError for shapes that the recipe does not take (the rows of x count once gradients are
    wanted), a missing seed, an `out_sharding` without explicit axes, a left operand that is contracted over its first axes
    and a right one over its last where `weight` does not say which is the weight, and what `jax.lax.dot_general` raises for
    dimension numbers.
    """
    recipe = recipe_of(recipe)
    _check(lhs, rhs, preferred_element_type)
    mesh = explicit_mesh((lhs, rhs))
    if out_sharding is not None and mesh is None:
        raise ValueError(
            "dot_general of a recipe takes an out_sharding under a mesh with explicit axes alone; constrain the result by "
            "jax.lax.with_sharding_constraint"
        )
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    like = jax.eval_shape(
        lambda a, b: jax.lax.dot_general(
            a, b, dimension_numbers, precision, preferred_element_type, **options
        ),
        lhs,
        rhs,
    )
    axes = tuple(tuple(tuple(int(axis) for axis in axes) for axes in pair) for pair in dimension_numbers)
    swapped = _weight_is_left(weight, (lhs.ndim, rhs.ndim), axes)
    rule = _Rule(recipe, str(like.dtype), _hashable(precision))
    words = None if seed is None else seed_words(seed)
    run = partial(_product, rule, axes, swapped, like.shape)
    if mesh is None:
        return run(lhs, rhs, words)
    arrays = [lhs, rhs] if words is None else [lhs, rhs, words]
    return automatic(run, arrays, mesh, like.sharding.spec)


def _product(
    rule: _Rule, axes: Any, swapped: bool, shape: Axes, lhs: jax.Array, rhs: jax.Array, words: Any = None
) -> jax.Array:
    """The product of checked operands. swapped: whether the left one is the weight."""
    x, w = (_matrices(a, c, b) for a, c, b in zip((lhs, rhs), *axes, strict=True))
    x, w = (w, x) if swapped else (x, w)
    _check_shapes(rule.recipe, x, w, ("output",))
    y: jax.Array = _linear()(rule, x, w, words)
    return (y.swapaxes(-1, -2) if swapped else y).reshape(shape)


def _weight_is_left(weight: str | None, ranks: Axes, axes: Any) -> bool:
    """Whether the left operand is the weight; ValueError where its axes look so and `weight` does not say it.

    An input is contracted over its last axes. A left operand that is not, beside a right one that is, and is not contracted
    over its first ones too, is what `jnp.einsum` makes of a weight on the right.
    """
    if weight is not None:
        return choice(weight, ("lhs", "rhs"), "weight") == "lhs"
    contracting, batch = axes
    last = [set(c) >= set(range(rank - len(c), rank)) for c, rank in zip(contracting, ranks, strict=True)]
    first = [set(range(len(b), len(b) + len(c))) == set(c) for c, b in zip(contracting, batch, strict=True)]
    if contracting[0] and not last[0] and last[1] and not first[1]:
        raise ValueError(
            "the left operand is contracted over its first axes and the right one over its last, as jnp.einsum hands on a "
            'weight and inputs: give weight="lhs" if the left one is the weight, else weight="rhs"; or use '
            "ao_lab.jax.training.einsum(subscripts, x, w, recipe=...)"
        )
    return False


def _check(lhs: Any, rhs: Any, preferred: Any) -> None:
    """TypeError or ValueError for arguments of kinds that there are not."""
    for value in (lhs, rhs):
        dtype = str(require_array(value, "dot_general").dtype)
        if dtype not in DTYPES:
            raise TypeError(
                f"dot_general takes {', '.join(DTYPES)}, got {dtype} of shape {value.shape}; cast it"
            )
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"both operands have one dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them")
    if preferred is not None and str(jnp.dtype(preferred)) not in DTYPES:
        raise TypeError(f"preferred_element_type is one of {', '.join(DTYPES)}, got {jnp.dtype(preferred)}")


def _hashable(precision: Any) -> Any:
    """A pair may come as a list."""
    return tuple(precision) if isinstance(precision, list) else precision


def _matrices(array: jax.Array, contracting: Axes, batch: Axes) -> jax.Array:
    """(rows, sum), or (batch, rows, sum) where there are batch axes."""
    free = [axis for axis in range(array.ndim) if axis not in (*contracting, *batch)]
    lengths = [prod(array.shape[axis] for axis in axes) for axes in (batch, free, contracting)]
    moved = array.transpose((*batch, *free, *contracting))
    return moved.reshape(lengths if batch else lengths[1:])


def _check_shapes(recipe: Recipe, x: jax.Array, w: jax.Array, products: Sequence[str]) -> None:
    reason = unsupported_reason(recipe, x.shape[-2:], w.shape[-2:], products=products)
    if reason is not None:
        raise ValueError(
            f"{reason}; pad it, or use another recipe for this layer (x has {x.shape[-2:]}, w {w.shape[-2:]})"
        )


@lru_cache(maxsize=1)
def _linear() -> Any:
    """x @ w.T with its gradients."""
    function = jax.custom_vjp(_output, nondiff_argnums=(0,))
    function.defvjp(_saving, _gradients)
    return function


def _output(rule: _Rule, x: jax.Array, w: jax.Array, seed: Any) -> jax.Array:
    return _saving_codes(rule, x, w, seed)[0]


def _saving(rule: _Rule, x: jax.Array, w: jax.Array, seed: Any) -> tuple[jax.Array, Any]:
    """The output, and what backward needs; whatever would stop backward stops here."""
    _check_shapes(rule.recipe, x, w, PRODUCTS)
    if rule.recipe.is_stochastic and seed is None:
        raise ValueError(missing_seed(rule.recipe))
    y, kept = _saving_codes(rule, x, w, seed)
    return y, (kept, w, seed)


def _saving_codes(rule: _Rule, x: jax.Array, w: jax.Array, seed: Any) -> tuple[jax.Array, Any]:
    """The output, and x or its codes."""
    words = words_of(rule.recipe, "output", (x.shape, w.shape), seed)
    return _each(_one_output, rule, x)(x, w, words)  # type: ignore[no-any-return]


def _one_output(rule: _Rule, x: jax.Array, w: jax.Array, words: Any) -> tuple[jax.Array, Any]:
    """`_saving_codes` of matrices."""
    a, b = operands("output", rule.recipe, words, x=x, w=w)
    y = product(factor(a), factor(b), rule.dtype, rule.precision)
    return y, a if _keeps_codes(rule.recipe) else x


def _keeps_codes(recipe: Recipe) -> bool:
    """Whether the weight gradient is taken from the output's codes of x."""
    forward, backward = recipe.output.a, recipe.weight_grad.b
    return forward.serves_transposed(backward) or (forward.scheme is not None and backward.source == "output")


def _gradients(rule: _Rule, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    kept, w, seed = saved
    kept, w, g = _first_order()((kept, w, g))
    lead, (m, n), k = g.shape[:-2], g.shape[-2:], w.shape[-1]
    shapes = {"input_grad": ((m, n), (k, n)), "weight_grad": ((n, m), (k, m))}
    words = [
        words_of(rule.recipe, which, ((*lead, *a), (*lead, *b)), seed) for which, (a, b) in shapes.items()
    ]
    return (*_each(_both_gradients, rule, g)(kept, w, g, words), None)


def _both_gradients(
    rule: _Rule, kept: Any, w: jax.Array, g: jax.Array, words: Any
) -> tuple[jax.Array, jax.Array]:
    """dx and dw of matrices."""
    a, b = operands("input_grad", rule.recipe, words[0], g=g, w=w)
    dx = product(factor(a), factor(b), w.dtype, rule.precision)
    pair = _of_weight_grad(rule.recipe, kept, g, words[1], str(w.dtype))
    return dx, product(*pair, w.dtype, rule.precision)


def _of_weight_grad(
    recipe: Recipe, kept: Any, g: jax.Array, words: tuple[Any, Any], dtype: str
) -> tuple[Factor, Factor]:
    """Both factors of the weight gradient, from x or its codes."""
    if not isinstance(kept, Quantized):
        a, b = operands("weight_grad", recipe, words, g=g, x=kept)
        return factor(a), factor(b)
    record = recipe.weight_grad
    a = factor(operand(g.T, record.a, None, words[0]))
    if record.b.source == "tensor":
        return a, transposed_factor(kept)
    return a, factor(operand(dequantize(kept, dtype).T, record.b, None, words[1]))


def _each(function: Any, rule: _Rule, like: jax.Array) -> Any:
    """The function of matrices, or of each of a batch."""
    return _mapped(function, rule) if like.ndim == 3 else partial(function, rule)


@lru_cache(maxsize=1024)
def _mapped(function: Any, rule: _Rule) -> Any:
    """As a program: without one a batch runs step by step, in hundreds of them."""
    return jax.jit(jax.vmap(partial(function, rule)))


@lru_cache(maxsize=1)
def _first_order() -> Any:
    """Its argument, whose derivative is an error: codes have none, so second derivatives would be wrong."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def same(value: Any) -> Any:
        return value

    @same.defjvp  # type: ignore[untyped-decorator]
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            "dot_general of a recipe has first derivatives alone; use jax.lax.dot_general where second ones are wanted"
        )

    return same
