"""The one rounding rule: an integer significand loses its low `shift` bits.

Every encoder and every scale comes down to this function, so a mode means the same everywhere. With
t = significand / 2**shift, exactly:

=============  ======================================================================================
nearest_even   nearest integer to t, ties to even
nearest_away   nearest integer to t, ties away from zero
toward_zero    t truncated
up, down       toward plus, minus infinity: the magnitude rounds up where the sign agrees
to_odd         t truncated, last bit set if anything was lost
stochastic     floor(t + r), r = the top `shift` bits of the element's random word as a fraction
=============  ======================================================================================

Stochastic rounding uses at most 24 random bits, in the carry form of LLVM's cvt.rs (gfloat calls it StochasticFastest). A
value so small that more than 24 bits are lost is truncated to 24 first, so its probability of rounding up is exact to 2**-24.
"""

from __future__ import annotations

from reference.arrays.errors import choice
from reference.arrays.namespace import Array, Namespace

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
# What a value rounded beyond the largest finite one becomes; see `reference.formats.encode`.
OVERFLOWS = ("saturate", "nonfinite", "inf", "nan")
STOCHASTIC_BITS = 24
# From here on a 24-bit significand rounds to 0, or to 1 in the modes that look at the lost bits.
LARGEST_SHIFT = 25


def check_mode(mode: str, random_bits: Array | None) -> str:
    """The mode's name if it exists and comes with random bits exactly when it needs them."""
    choice(mode, MODES, "rounding")
    if (mode == "stochastic") != (random_bits is not None):
        need = "needs random_bits, one uint32 per element" if mode == "stochastic" else "takes no random_bits"
        raise ValueError(f"rounding {mode!r} {need}; see reference.random_bits")
    return mode


def round_shift(
    ns: Namespace,
    significand: Array,
    shift: Array,
    negative: Array,
    mode: str,
    random_bits: Array | None = None,
) -> Array:
    """Integer nearest to significand / 2**shift in the given mode; 0 <= significand < 2**24, shift >= 1, int32."""
    if mode == "stochastic":
        return _stochastic(significand, shift, random_bits, ns)
    shift = ns.minimum(shift, LARGEST_SHIFT)
    floor = significand >> shift
    if mode == "nearest_even":
        return (significand + ((1 << (shift - 1)) - 1) + (floor & 1)) >> shift
    if mode == "nearest_away":
        return (significand + (1 << (shift - 1))) >> shift
    if mode == "toward_zero":
        return floor
    inexact = ns.astype((floor << shift) != significand, "int32")
    if mode == "to_odd":
        return floor | inexact
    grows = negative if mode == "down" else ~negative
    return floor + (inexact & ns.astype(grows, "int32"))


def _stochastic(significand: Array, shift: Array, random_bits: Array | None, ns: Namespace) -> Array:
    excess = ns.minimum(ns.maximum(shift - STOCHASTIC_BITS, 0), 31)
    shift = ns.minimum(shift, STOCHASTIC_BITS)
    # The word's top 24 bits as a non-negative int32, of which the top `shift` are used.
    word = (ns.bitcast(random_bits, "int32") >> 8) & 0xFFFFFF
    return ((significand >> excess) + (word >> (STOCHASTIC_BITS - shift))) >> shift
