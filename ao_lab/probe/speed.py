"""Whether a candidate would be quicker than 16-bit products: a model of one H200, not a measurement (`ao_lab.tune` measures).

A product takes the longer of its multiply-adds and its bytes; a cast reads 16 bits of each input and writes its codes. Rates
are those that were measured on an H200: 4.3 TB/s of a copy, 680 TFLOP/s in bfloat16, 1250 in FP8 and INT8.
"""

from __future__ import annotations

from reference.training.recipe import Operand, Recipe

COPY, BF16, EIGHT = 4.3e12, 680e12, 1250e12
#: What lengths of products of 8-bit operands are multiples of.
STEP = 16


def speed_of(recipe: Recipe, shape: tuple[int, int], tokens: int) -> float | None:
    """The time of the 16-bit product of (tokens, K) by (N, K) over that of the candidate; None where it has no such kernel."""
    n, k = shape
    x, w = recipe.output.a, recipe.output.b
    if w.scheme is None or not tokens:
        return None
    both = x.scheme is not None
    if both and not (bits(x) <= 8 and bits(w) <= 8 and n % STEP == 0 and k % STEP == 0):
        return None
    plain = product_seconds(tokens, n, k, 2 * k, 2 * n * k, BF16)
    stored = n * k * bits(w) / 8
    if not both:
        return plain / product_seconds(tokens, n, k, 2 * k, stored, BF16)
    cast = tokens * k * (2 + bits(x) / 8) / COPY
    return plain / (product_seconds(tokens, n, k, k * bits(x) / 8, stored, EIGHT) + cast)


def product_seconds(m: int, n: int, k: int, row: float, weight: float, rate: float) -> float:
    """Of (m, k) by (n, k) with 16-bit outputs: `row` bytes of a row of inputs, `weight` of all weights, `rate` in FLOP/s."""
    return max(2 * m * n * k / rate, (m * row + weight + 2 * m * n) / COPY)


def bits(operand: Operand) -> float:
    """Bits of an element, 16 where nothing is quantized."""
    return 16 if operand.scheme is None else operand.scheme.format.bits
