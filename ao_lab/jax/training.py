"""Low-precision training in JAX: products by the recipes of `reference.training`, forward and both gradients quantized.

`dot_general` stands for `jax.lax.dot_general`, `DotGeneral` for what takes such a function (flax), `einsum` for `jnp.einsum`.

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

Operands have the bits of `reference.training.linear.operands`: by the reference under XLA on a CPU, by kernels on a GPU. A seed
is an integer, or an array: an integer (a step number, say), the data of a JAX key, or a key, of any implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ao_lab.jax.functions import dequantize, quantize, require_array
from ao_lab.jax.matmul import DTYPES, Factor, factor, product, transposed_factor
from reference import Quantized
from reference.arrays.bridges import automatic, explicit_mesh
from reference.arrays.namespace import choice
from reference.formats.encode import MASK, MULTIPLIER, ROUNDS, WEYL
from reference.layers.hadamard import hadamard
from reference.training.linear import unsupported_reason
from reference.training.recipe import PRODUCTS, Operand, Recipe, recipe_of

Axes = tuple[int, ...]


@dataclass(frozen=True)
class DotGeneral:
    """`dot_general` with its recipe, for what calls its function like `jax.lax.dot_general` (flax, einsum).

    seed, weight: as in `dot_general`; the seed may be an array of the program that calls this. ValueError for another recipe or
    weight.
    """

    recipe: str | Recipe
    seed: Any = None
    weight: str | None = None

    def __post_init__(self) -> None:
        recipe_of(self.recipe)
        if self.weight is not None:
            choice(self.weight, ("lhs", "rhs"), "weight")

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        **others: Any,
    ) -> jax.Array:
        """The product; see `dot_general`. TypeError for arguments of another function, as those of convolutions are."""
        if others:
            raise TypeError(
                f"DotGeneral multiplies matrices and takes no {', '.join(others)}: convolutions are not covered; leave "
                f"conv_general_dilated as flax has it, and give dot_general to dense layers"
            )
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
    """`jax.lax.dot_general` of x (`lhs`) and w (`rhs`), its gradients too, by a recipe of `reference.RECIPES`.

    lhs, rhs: JAX arrays, both float32, bfloat16 or float16. dimension_numbers and the shape of the result: as in
    `jax.lax.dot_general`. precision: of products of operands that are not quantized. preferred_element_type: the dtype of the
    result, and of the gradient that comes back; by default that of the operands. seed: where the recipe rounds
    stochastically, another one for each layer and step: a JAX key, an integer or an array of one (`seed_words`). weight:
    "rhs" or "lhs", which of the operands is the weight; by default the right one. out_sharding: as in `jax.lax.dot_general`,
    under a mesh with explicit axes.

    The operands have the bits of `reference.training.linear.operands` under that seed; word i of a stream is for element i of
    all batches together, and a seed that `vmap` does not map is one for all. Sums are float32 (`ao_lab.jax.matmul`).
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
    rule = _Rule(recipe, str(like.dtype), tuple(precision) if isinstance(precision, list) else precision)
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


# `einsum`: `dot_general`, with the axes named by letters.


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: str | Recipe,
    seed: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`jnp.einsum(subscripts, x, w)` of inputs x and a weight w, its gradients too, by a recipe.

    subscripts: "BSD,CKDH->CBSKH", one letter for each axis, the result named; an axis stands once in each operand, and an
    axis of one operand stands in the result. `jnp.einsum` may exchange its operands before it calls `_dot_general`; here the
    first is the input whatever the order of the result. Other arguments, roundings and errors as in `dot_general`; ValueError
    for other subscripts.
    """
    a, b, made = _parsed(subscripts)
    for labels, value, name in ((a, x, "x"), (b, w, "w")):
        if require_array(value, "training.einsum").ndim != len(labels):
            raise ValueError(
                f"einsum {subscripts!r}: {name} has {value.ndim} axes, its subscripts {len(labels)}"
            )
    batch = [label for label in made if label in a and label in b]
    contracted = [label for label in a if label in b and label not in made]
    pairs = [tuple(tuple(map(one.index, labels)) for one in (a, b)) for labels in (contracted, batch)]
    y = dot_general(
        x, w, tuple(pairs), precision, preferred_element_type, recipe=recipe, seed=seed, weight="rhs"
    )
    free = [label for one in (a, b) for label in one if label not in batch and label not in contracted]
    names = [*batch, *free]
    return y.transpose([names.index(label) for label in made])


def _parsed(subscripts: str) -> tuple[str, str, str]:
    """Labels of both operands and of the result; ValueError for what is no product of two operands."""
    operands, _, made = subscripts.replace(" ", "").partition("->")
    parts = operands.split(",")
    good = len(parts) == 2 and all(
        (part.isalpha() or not part) and len(set(part)) == len(part) for part in (*parts, made)
    )
    a, b = map(set, parts) if good else (set(), set())
    if not good or not a ^ b <= set(made) <= a | b:
        raise ValueError(
            f"einsum of a recipe takes 'ab,bc->ac': two operands, the result named, each letter once in each, letters of one "
            f"operand in the result; got {subscripts!r}"
        )
    return parts[0], parts[1], made


# Operands of the products.


def words_of(
    recipe: Recipe, which: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], seed: Any
) -> tuple[Any, Any]:
    """Random words for both operands of a product, None where nothing is drawn; shapes may have leading axes.

    ValueError where the recipe draws and there is no seed.
    """
    record, first = getattr(recipe, which), 2 * PRODUCTS.index(which)
    words = []
    for at, (one, shape) in enumerate(zip((record.a, record.b), shapes, strict=True)):
        if one.is_stochastic and seed is None:
            raise ValueError(missing_seed(recipe))
        words.append(random_words(shape, seed, first + at) if one.is_stochastic else None)
    return words[0], words[1]


def missing_seed(recipe: Recipe) -> str:
    """What to say where a stochastic recipe has no seed."""
    return (
        f"recipe {recipe.name} rounds stochastically and needs seed=, another one for each layer and step: a key "
        f"(jax.random.fold_in(key, step), flax's make_rng) or an integer"
    )


def operands(
    which: str, recipe: Recipe, words: tuple[Any, Any], *, x: Any = None, w: Any = None, g: Any = None
) -> tuple[Any, Any]:
    """`reference.training.linear.operands` of matrices, with the random words of `words_of`."""
    a, b = {"output": (x, w), "input_grad": (g, _T(w)), "weight_grad": (_T(g), _T(x))}[which]
    record = getattr(recipe, which)
    forward = {"output": None, "input_grad": recipe.output.b, "weight_grad": recipe.output.a}[which]
    return operand(a, record.a, None, words[0]), operand(b, record.b, forward, words[1])


def operand(x: Any, record: Operand, forward: Operand | None, words: Any) -> Any:
    """`reference.training.linear.operand`, with given random words."""
    if record.source == "output" and forward is not None and forward.scheme is not None:
        x = _T(dequantize(quantize(_T(x), forward.scheme), str(x.dtype)))
    if record.hadamard:
        x = hadamard(x, record.hadamard)
    return x if record.scheme is None else quantize(x, record.scheme, random_bits=words)


def _T(x: Any) -> Any:
    return None if x is None else x.T


# `reference.random_bits` in JAX, so that a seed may be an array of a compiled program: the same words.

#: Elements that 32 bits of a counter reach, four words each.
MOST = 1 << 34
#: Shapes of the data of one key.
KEYS = ((2,), (4,))


def seed_words(seed: Any) -> jax.Array:
    """A seed as uint32 (2,), its high word and its low one, as a key of JAX's threefry has them.

    seed: an integer from 0 to 2**64 - 1; an array of any integer dtype and shape (), whose low 32 bits are the low word (a
    negative one wraps); a key, or its data, of JAX or NumPy. Of threefry, JAX's default, the two words are the seed: so
    `jax.random.PRNGKey(n)`, `jax.random.key(n)` and n are one. Keys of more words (rbg, unsafe_rbg: four) are hashed: the first
    two are the seed of Philox, the next two its counter, and two words of what it draws the seed, or that of the next ones.
    TypeError or ValueError for anything else.
    """
    if isinstance(seed, np.ndarray) and seed.dtype == np.uint32 and seed.ndim:
        seed = jnp.asarray(seed)
    if isinstance(seed, jax.Array):
        return _of_array(seed)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(
            f"seed is an integer, a JAX array of one or a JAX key, got {type(seed).__name__}: {seed!r:.60}"
        )
    number = seed.__index__()
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed is an integer from 0 to 2**64 - 1, got {number}")
    return jnp.asarray([number >> 32, number & MASK], jnp.uint32)


def _of_array(seed: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
        return jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
    if seed.shape not in KEYS or seed.dtype != jnp.uint32:
        raise TypeError(
            f"a seed in an array is one integer, a key, or the two or four uint32 words of one; got {seed.dtype} of shape "
            f"{seed.shape}"
        )
    words = seed[:2]
    for at in range(2, seed.shape[0], 2):
        zero = jnp.zeros((), jnp.uint32)
        words = jnp.stack(_philox(words, (seed[at], seed[at + 1], zero, zero))[:2])
    return words


def random_words(shape: tuple[int, ...], seed: jax.Array, stream: int) -> jax.Array:
    """`reference.random_bits(shape, seed=seed, stream=stream)` for a seed as `seed_words` gives it."""
    count = prod(shape)
    if count > MOST:
        raise ValueError(f"random words are for arrays of at most 2**34 elements, got shape {shape}")
    index = jnp.arange(-(-count // 4), dtype=jnp.uint32)
    zero = jnp.zeros_like(index)
    words = _philox(seed, (index, zero, zero + jnp.uint32(stream), zero))
    return jnp.stack(words, axis=-1).reshape(-1)[:count].reshape(shape)


def _philox(seed: jax.Array, counter: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Philox 4x32-10; uint32 wraps."""
    c0, c1, c2, c3 = counter
    k1, k0 = seed[0], seed[1]
    for _ in range(ROUNDS):
        (high, low), (high_2, low_2) = _wide(MULTIPLIER[0], c0), _wide(MULTIPLIER[1], c2)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high ^ c3 ^ k1, low
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def _wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of a * b: without x64 JAX has no 64-bit integers, so by halves of 16 bits."""
    low_a, high_a = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    low_b, high_b = b & 0xFFFF, b >> 16
    middle = high_a * low_b + (low_a * low_b >> 16)
    other = low_a * high_b + (middle & 0xFFFF)
    return high_a * high_b + (middle >> 16) + (other >> 16), jnp.uint32(a) * b
