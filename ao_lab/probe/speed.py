"""Whether a candidate would be quicker than 16-bit products: a model of one H200, not a measurement (`ao_lab.tune` measures).

A product takes the longer of its multiply-adds and its bytes; a cast reads 16 bits of each input and writes its codes. Rates
were measured on an H200 and stand in `fast/coefficients.toml`, section `h200`.
"""

from __future__ import annotations

from fast.cost import Coefficients
from reference.training.recipe import Operand, Recipe

H200 = Coefficients("h200")
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
    plain = product_seconds(tokens, n, k, 2 * k, 2 * n * k, H200.bfloat16)
    stored = n * k * bits(w) / 8
    if not both:
        return plain / product_seconds(tokens, n, k, 2 * k, stored, H200.bfloat16)
    cast: float = tokens * k * (2 + bits(x) / 8) / H200.copy
    return plain / (product_seconds(tokens, n, k, k * bits(x) / 8, stored, H200.eight_bits) + cast)


def product_seconds(m: int, n: int, k: int, row: float, weight: float, rate: float) -> float:
    """Of (m, k) by (n, k) with 16-bit outputs: `row` bytes of a row of inputs, `weight` of all weights, `rate` in FLOP/s."""
    bytes_moved = m * row + weight + 2 * m * n
    seconds: float = max(2 * m * n * k / rate, bytes_moved / H200.copy)
    return seconds


def bits(operand: Operand) -> float:
    """Bits of an element, 16 where nothing is quantized."""
    return 16 if operand.scheme is None else operand.scheme.format.bits
