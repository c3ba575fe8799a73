"""What follows once a block's elements are in registers: their largest magnitude, scale, codes and values.

Elements come one tensor for each place in a block (or in a word), which has the shape of the scales or broadcasts with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, bits_of, is_nan, narrow
from fast.kernels.rules.scaled import element_codes, reciprocal
from fast.kernels.rules.statistics import larger
from fast.kernels.rules.values import combined, unscaled, values
from fast.kernels.tile.fast_codes import multiplier
from fast.kernels.tile.fast_values import finished, rounded_values
from fast.kernels.tile.stochastic_rounding import stochastic_codes


@triton.jit
def largest_of(v, COUNT: tl.constexpr, FINITE_ONLY: tl.constexpr, HAS_PTX: tl.constexpr):
    """Pattern of the largest magnitude of a tuple, element by element. FINITE_ONLY: NaN and infinity count as 0."""
    if HAS_PTX and not FINITE_ONLY:
        made = tl.abs(v[0])
        for i in tl.static_range(1, COUNT):
            made = larger(made, tl.abs(v[i]))
        return bits_of(made) & MAGNITUDE
    else:
        found = _magnitude(v[0], FINITE_ONLY)
        for i in tl.static_range(1, COUNT):
            found = tl.maximum(found, _magnitude(v[i], FINITE_ONLY))
        return found


@triton.jit
def _magnitude(v, FINITE_ONLY: tl.constexpr):
    made = bits_of(v) & MAGNITUDE
    if FINITE_ONLY:
        made = tl.where(made < INFINITY, made, 0)
    return made


@triton.jit
def factor_of(s, scale_code, prepared, outer, SCHEME: tl.constexpr):
    """What elements are multiplied by before they are rounded."""
    if SCHEME.power_of_two or SCHEME.under_outer:
        return multiplier(s, scale_code, prepared, SCHEME)
    else:
        return reciprocal(s, outer, SCHEME)


@triton.jit
def codes_of(v, s, factor, outer, bits, SCHEME: tl.constexpr, DRAWS: tl.constexpr):
    """int32 codes. DRAWS: scaled elements are rounded stochastically by `stochastic_codes`; else by the rules."""
    if DRAWS:
        made = stochastic_codes(v * factor, bits, SCHEME.element)
        return tl.where(is_nan(s), SCHEME.poison_code, made)
    else:
        return element_codes(v, s, outer, None, bits, SCHEME)


@triton.jit
def values_of(v, s, factor, outer, bits, SCHEME: tl.constexpr, DRAWS: tl.constexpr, DTYPE: tl.constexpr):
    """What the codes stand for, in a dtype; NaN in poisoned blocks."""
    c = combined(s, outer, SCHEME, "float32")
    if not SCHEME.has_ptx:
        made = codes_of(v, s, factor, outer, bits, SCHEME, DRAWS)
        return narrow(values(made, c, None, SCHEME, "float32"), DTYPE, True)
    elif SCHEME.fast_path != "" and not DRAWS:
        value = rounded_values(v, factor, s, None, SCHEME)
    else:
        value = unscaled(codes_of(v, s, factor, outer, bits, SCHEME, DRAWS), None, SCHEME)
    return finished(value * c, c, DTYPE)
