"""The operands of a training recipe's products for JAX arrays, and the products.

`operands` gives the bits of `reference.training.linear.operands`: by the reference under XLA on a CPU, by kernels on a GPU.

A product multiplies what the codes stand for, in bfloat16 where that is exact (every recipe of `RECIPES`: an element has at
most 8 significant bits, its block's scale included), else in float32, by `jax.lax.dot_general` with float32 sums; scales that
do not change along the sum multiply the sums. So it is `reference.matmul` of the tier "blocked", with sums in XLA's order,
within `matmul_error_bound(..., accumulation="blocked")`, but that XLA may flush subnormal values to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.jax.functions import dequantize, quantize
from ao_lab.jax.training.random_words import random_words
from reference import Quantized, decode
from reference.formats.formats import FORMATS, Format
from reference.schemes.schemes import POWER_RULES, Scheme
from reference.training.hadamard import hadamard
from reference.training.recipe import PRODUCTS, Operand, Recipe

#: Bits of a significand of bfloat16.
BFLOAT16_BITS = 8


@dataclass(frozen=True)
class Factor:
    """One operand as it is multiplied: values (rows, sum), and the scales of sums, each 0-d or (rows, 1)."""

    values: Any
    scales: tuple[Any, ...] = ()
    quantized: bool = True


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


def product(a: Factor, b: Factor, dtype: Any, precision: Any) -> jax.Array:
    """a @ b.T in `dtype`; precision: where neither is quantized."""
    # By name: strict promotion has no way from one dtype to another.
    carrier = a.values.dtype if a.values.dtype == b.values.dtype else jnp.dtype("float32")
    if a.quantized or b.quantized:
        # Whatever the default is: a GPU's is 10 bits of each float32 factor. bfloat16 factors are multiplied exactly.
        precision = jax.lax.Precision.HIGHEST if carrier == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    values = (a.values.astype(carrier), b.values.astype(carrier))
    total = jax.lax.dot_general(*values, dimensions, precision, preferred_element_type=jnp.float32)
    for scale in a.scales:
        total = total * scale
    for scale in b.scales:
        total = total * scale.reshape((1, -1))
    return total.astype(dtype)


def factor(q: Any) -> Factor:
    """An operand as it is multiplied."""
    if not isinstance(q, Quantized):
        return Factor(q, (), False)
    inner = _without_outer(q.scheme)
    if inner is None:
        return Factor(dequantize(q))
    outer = () if q.outer is None else (q.outer,)
    dtype = "bfloat16" if _fits_bfloat16(inner) else "float32"
    if inner.scale.block in ("tensor", -1) and inner.scale.storage == "float32":
        return Factor(decode(q.codes, inner.element).astype(dtype), (q.scale, *outer))
    return Factor(dequantize(replace(q, scheme=inner, outer=None), dtype), outer)


def transposed_factor(q: Quantized) -> Factor:
    """`factor` of the transposed matrix, for codes that serve it (`Operand.serves_transposed`)."""
    made = factor(q)
    return Factor(made.values.T, made.scales)


@lru_cache(maxsize=256)
def _without_outer(scheme: Scheme) -> Scheme | None:
    """The scheme of code times block scale, where a value is that times the outer scale; None for other values."""
    scale, outer = scheme.scale, scheme.outer
    plain = scheme.zero is None and scheme.format.kind in ("float", "int") and scale.stored == "decode"
    simple = outer is None or (
        outer.statistic == "absmax_elements" and outer.stored == "decode" and outer.storage == "float32"
    )
    if not plain or not simple or scheme.dequantize != "float32" or scale.flat_size:
        return None
    return scheme if outer is None else replace(scheme, name=f"{scheme.name}_inner", outer=None)


def _fits_bfloat16(scheme: Scheme) -> bool:
    """Whether a code, times a block's scale where scales change along the sum, has at most 8 significant bits."""
    scale = scheme.scale
    bits = _significant(scheme.format)
    if scale.block not in ("tensor", -1) and scale.rule not in (*POWER_RULES, "ratio_pow2"):
        bits += 24 if scale.storage == "float32" else _significant(FORMATS[scale.storage])
    return bits <= BFLOAT16_BITS


def _significant(fmt: Format) -> int:
    return fmt.mantissa_bits + 1 if fmt.kind == "float" else fmt.bits


def _T(x: Any) -> Any:
    return None if x is None else x.T
