"""How far a matmul may be from the exact result: a bound per output element, with its proof.

T is the exact sum of products plus bias, S = sum |a||b| + |bias|, u = 2**-24, gamma(n) = n u / (1 - n u). A product of n
factors (1 + d)**(+-1), |d| <= u, is 1 + t with |t| <= gamma(n) (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., lemma 3.1).

float32 sums. In any tree of additions over the K products a term passes K - 1 additions at most, and one rounding of its
product (none with fused multiply-add, whose rounding is the addition's), and one addition of the bias: n = K, or K + 1.
Additions are exact when their result is subnormal, products and fused operations then err by 2**-150 at most:

    |got - T| <= gamma(n) S + n (1 + gamma(n)) 2**-150.

With blocks of exact sums in declared order a term passes the rounding of its block and one addition for every block but the
first: n = the number of blocks (plus 1 for a bias), the rounding of a block underflowing by 2**-150 at most.

Truncating tensor core (`reference.matmul.tensor_core_model`), F = frac_bits, m = mantissa_bits. Truncation toward zero
never increases a magnitude, so every accumulator is at most the sum of |products| before it, at most S. The alignment
exponent E belongs to the accumulator, 2**E <= max(S, 2**-126), or to a product: 2**E = 2**e(a) 2**e(b), at most the
largest product of magnitudes when subnormal operands are counted as 2**emin. (It may exceed the product itself: subnormal
operands align early. With S alone, as is often written, the bound is false.) With S' = sum max(|a|, 2**emin) max(|b|,
2**emin) over the nonzero products, 2**E <= max(S', 2**-126). Cutting one term loses less than 2**(E-F). A chain of k terms
cuts every product once, and at each of its s = ceil(k / k_step) steps the accumulator and the delivered sum, which loses
less than 2**-m max(S, 2**-126). Sums in between are exact. Hence one chain errs by less than

    (k 2**-F + s (2**-F + 2**-m)) max(S', 2**-126).

Chains promoted to float32 add their errors, which are proportional to their own S', and the additions as above, on partial
sums that are at most S: (k_chain 2**-F + s_chain (2**-F + 2**-m)) S' + gamma(number of chains) S.

Scales. A kernel multiplies by r scale factors, each product rounded: n grows by r. T is defined with dequantized operands,
which carry up to d roundings each way (two for an encoding scale): n grows by d more. Underflow of a product with a scale
adds 2**-150, times the scales that follow. S and S' are then sums of |code| |scale| products.

Rounding to a narrower output adds half a unit in the last place at |T| + error; where float32 or the output may overflow,
the bound is infinite, and so it is where T is not finite: nothing is promised there. Kernels that flush subnormals are not
covered. This is our own derivation; tests try to break it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, choice, dtype_name, namespace_of
from reference.matmul.exact import F64, RESULTS, exact_matmul
from reference.matmul.matmul import ACCUMULATIONS, bias_of, block_step, operands_of, tensor_core
from reference.matmul.operands import Operand, format_of_operand, from_host
from reference.matmul.tensor_core_model import power_of
from reference.quantize.quantize import Quantized

ROUNDOFF = 2.0**-24
UNDERFLOW = 2.0**-150
#: Factor that covers the float64 roundings in the bound's own arithmetic (fewer than 100 of 2**-53 each).
UPWARD = 1 + 2.0**-40


def matmul_error_bound(
    a: Array | Quantized,
    b: Array | Quantized,
    *,
    accumulation: str = "exact",
    block: int = 128,
    k_step: int = 32,
    frac_bits: int = 13,
    promote: int | None = None,
    out_dtype: DTypeLike = "float32",
    bias: Array | None = None,
    operand_formats: tuple[str, str] | None = None,
    order: str = "any",
) -> Array:
    """The largest |got - T| of each output element: (..., M, N), never too small, in the library of `a`.

    T is the real number sum a b + bias (for `Quantized`: of the dequantized values), not its float32 rounding: when
    comparing with `matmul(..., accumulation="exact")`, add that tier's bound too. Arguments are those of `matmul`.

    `order` matters for ``blocked``: ``any`` covers every kernel that adds exact or float32-rounded products in float32, in
    any order or tree; ``declared`` covers blocks of `block` exact sums added one after the other. ``hopper_fp8`` covers
    every permutation of K in both. ``exact`` covers one rounding of T.

    The result is float64 (in JAX float32, rounded up); infinite where overflow cannot be excluded or T is not finite.
    Raises ValueError and TypeError as `matmul` does.
    """
    choice(accumulation, ACCUMULATIONS, "accumulation")
    choice(order, ("any", "declared"), "order")
    out_dtype = dtype_name(out_dtype, tuple(RESULTS), "out_dtype")
    left, right = operands_of(a, b)
    added = bias_of(bias, left, right)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = np.abs(exact_matmul(left.values, right.values, added)) * UPWARD
        error = np.zeros_like(truth)
        if accumulation == "blocked":
            error = float32_error(
                left, right, added, left.k if order == "any" else _parts(left, right, block)
            )
        elif accumulation == "hopper_fp8":
            error = _tensor_core_error(left, right, added, (k_step, frac_bits, promote), operand_formats)
        if accumulation == "exact" or out_dtype != "float32":
            error = error + rounding_error(truth + error, out_dtype)
        bound = np.where(np.isfinite(truth) & np.isfinite(error), error * UPWARD, np.inf)
    return of_library(bound, a)


def gamma(n: int) -> float:
    """n u / (1 - n u), u = 2**-24; infinite from n = 2**24 on."""
    return n * ROUNDOFF / (1 - n * ROUNDOFF) if n * ROUNDOFF < 1 else math.inf


def _parts(left: Operand, right: Operand, size: int | None) -> int:
    return -(-left.k // block_step(left, right, size))


def float32_error(left: Operand, right: Operand, bias: F64 | None, n: int) -> F64:
    """Error of float32 arithmetic in which every term passes at most n roundings, besides those of scales and bias."""
    factors = _factor_count(left) + _factor_count(right)
    n = n + 2 * factors + (bias is not None)
    total = _sum(_magnitude(left), _magnitude(right)) + (0.0 if bias is None else np.abs(bias))
    underflow = (n + left.k) * (_growth(left) * _growth(right)) * (1 + gamma(n)) * UNDERFLOW
    error = gamma(n) * total + underflow + _dequantized_underflow(left, right)
    return np.where(_may_overflow(left, right, total * (1 + gamma(n)) + error), np.inf, error)


def _tensor_core_error(
    left: Operand,
    right: Operand,
    bias: F64 | None,
    core: tuple[int, int, int | None],
    names: tuple[str, str] | None,
) -> F64:
    """Error of the chains, and of the float32 arithmetic that joins them."""
    k_step, frac_bits, promote = core
    model = tensor_core(k_step, frac_bits, promote)
    given = (None, None) if names is None else names
    emin = [format_of_operand(x, g, n).emin for x, g, n in zip((left, right), given, ("a", "b"), strict=True)]
    chain, chains = min(block_step(left, right, promote), left.k), _parts(left, right, promote)
    align, deliver = 2.0**-model.frac_bits, 2.0**-model.mantissa_bits
    share = chain * align + -(-chain // k_step) * (align + deliver)
    padded = _sum(_magnitude(left, emin[0]), _magnitude(right, emin[1]))
    floor = chains * 2.0**-126 * _growth(left) * _growth(right)
    return share * (padded + floor) + float32_error(left, right, bias, chains)


def rounding_error(x: F64, name: str) -> F64:
    """Half a unit in the last place of `name` at magnitudes up to x; infinite where that may round to infinity."""
    mantissa, emin, emax = RESULTS[name]
    half = np.maximum(power_of(np.where(np.isfinite(x), x, 0.0), emin), 2.0**emin) * 2.0 ** (-mantissa - 1)
    return np.where(x < 2.0 ** (emax + 1) - 2.0 ** (emax - mantissa - 1), half, np.inf)


def _factors(operand: Operand) -> list[F64]:
    """The scale factors of an operand, each broadcastable to the tensor."""
    spread = [] if operand.scale is None else [np.abs(_along(operand))]
    return spread + ([] if operand.outer is None else [np.abs(operand.outer)])


def _factor_count(operand: Operand) -> int:
    """Roundings that scales cost, on one side: a product each, and a reciprocal where a scale is stored for encoding."""
    return sum(1 + inverted for inverted in operand.inverted)


def _along(operand: Operand) -> F64:
    if operand.scale is None or operand.group is None:
        return np.asarray(operand.scale)
    spread = np.repeat(operand.scale, operand.group, axis=operand.axis)
    return spread[..., : operand.k] if operand.axis == -1 else spread[..., : operand.k, :]


def _magnitude(operand: Operand, emin: int | None = None) -> F64:
    """|code| times its scales; with `emin`, nonzero codes count as 2**emin at least."""
    magnitude = np.abs(operand.codes)
    if emin is not None:
        magnitude = np.where(magnitude == 0, 0.0, np.maximum(magnitude, 2.0**emin))
    for factor in _factors(operand):
        magnitude = magnitude * factor * UPWARD
    return magnitude


def _growth(operand: Operand) -> float:
    """The most that the other factors of a scaled operand can magnify an underflow; 1 without scales.

    Factors that are NaN leave elements without a bound; those of others are as large beside them.
    """
    factors = _factors(operand)
    parts = [*factors, np.abs(operand.codes)] if factors else []
    return math.prod(max(1.0, float(np.nanmax(part, initial=0.0))) for part in parts)


def _sum(x: F64, y: F64) -> F64:
    """x @ y rounded up: at most K + 2 roundings of 2**-53 enter any sum of products, in any order.

    Of contiguous operands: in which order a library adds may depend on how they lie, and equal numbers have one bound.
    """
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    return np.asarray(np.matmul(x, y) * (1 + (x.shape[-1] + 4) * 2.0**-52))


def _dequantized_underflow(left: Operand, right: Operand) -> F64 | float:
    """What T may differ from the product of unrounded operands because a dequantized value underflowed."""
    lost = [2 * _factor_count(x) * _growth(x) * UNDERFLOW for x in (left, right)]
    if not any(lost):
        return 0.0
    (x, y), k = (_magnitude(left), _magnitude(right)), left.k
    rows, columns = x.sum(axis=-1)[..., :, None], y.sum(axis=-2)[..., None, :]
    return np.asarray(lost[1] * rows + lost[0] * columns + k * lost[0] * lost[1])


def _may_overflow(left: Operand, right: Operand, total: F64) -> Any:
    """Where a float32 intermediate may overflow: the sums, the code sums magnified by scales, a dequantized value."""
    limit = 2.0**127
    magnified = _sum(np.abs(left.codes), np.abs(right.codes)) * (_growth(left) * _growth(right))
    largest = [float(np.nanmax(_magnitude(x), initial=0.0)) for x in (left, right) if x.scale is not None]
    unscaled = left.scale is None and right.scale is None
    return (
        (total >= limit * (2 - 2.0**-24))
        | (not unscaled and (magnified >= limit))
        | any(x >= limit for x in largest)
    )


def of_library(bound: F64, like: Array | Quantized) -> Array:
    """A bound in the library of `like`: float64, in JAX float32, rounded up."""
    if namespace_of(like.codes if isinstance(like, Quantized) else like).name != "jax":
        return from_host(bound, "float64", like)
    with np.errstate(over="ignore", under="ignore"):
        narrow = bound.astype(np.float32)
    up = np.where(narrow < bound, np.nextafter(narrow, np.float32(np.inf)), narrow)
    return from_host(up.astype(np.float64), "float32", like)
