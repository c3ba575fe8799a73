"""Float arithmetic in a stated precision: float32, or every result rounded again to a 16-bit dtype; and results as arrays.

Rounding a float32 result to bfloat16 or float16 is what PyTorch's CPU kernels do. For one operation on 16-bit operands it
equals the directly rounded result, because 24 >= 2 * 11 + 2 (Figueroa, SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

from reference.arrays.namespace import Array, Namespace, codes_of
from reference.arrays.softfloat import (
    INFINITY,
    MAGNITUDE,
    NAN,
    add,
    bits_of,
    divide,
    is_nan,
    multiply,
    subtract,
    widen_float16,
)
from reference.formats.encode import encode_bits, round_to_integer
from reference.formats.formats import FORMATS


class Arithmetic:
    """Operations on float32 bit patterns (int32), each rounded to `dtype`."""

    def __init__(self, ns: Namespace, dtype: str) -> None:
        self.ns = ns
        self.dtype = "float32" if dtype == "float64" else dtype

    def round(self, bits: Array) -> Array:
        """Nearest even in the dtype; overflow gives infinity, NaN stays."""
        if self.dtype == "float32":
            return bits
        narrow = encode_bits(self.ns, bits, FORMATS[self.dtype], "nearest_even", "nonfinite")
        wide = narrow << 16 if self.dtype == "bfloat16" else widen_float16(self.ns, narrow)
        return self.ns.where(is_nan(bits), NAN, wide)

    def constant(self, value: float, like: Array) -> Array:
        """A Python number, rounded to the dtype as an operand; shape (1,)."""
        return self.round(self.ns.full((1,), bits_of(value), "int32", like))

    def multiply(self, a: Array, b: Array) -> Array:
        return self.round(multiply(self.ns, a, b))

    def divide(self, a: Array, b: Array) -> Array:
        return self.round(divide(self.ns, a, b))

    def add(self, a: Array, b: Array) -> Array:
        return self.round(add(self.ns, a, b))

    def subtract(self, a: Array, b: Array) -> Array:
        return self.round(subtract(self.ns, a, b))

    def reciprocal(self, a: Array) -> Array:
        return self.divide(self.constant(1.0, a), a)

    def round_integer(self, bits: Array) -> Array:
        """Nearest int32, ties to even; magnitudes beyond 2**14 are some integer beyond it."""
        return round_to_integer(self.ns, bits, 0, "nearest_even")


def to_dtype_bits(ns: Namespace, bits: Array, name: str, *, saturate: bool = False) -> Array:
    """float32 bit patterns rounded to nearest even into an array of dtype `name`: `float32_bits` the other way.

    A finite value beyond the target's range becomes infinity, or its largest finite value with `saturate`.
    """
    if name == "float32":
        return ns.bitcast(bits, "float32")
    if name == "float64":
        if ns.name == "jax" and not ns.jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(
                "JAX has no float64 unless jax_enable_x64 is set; ask for float32, which holds every value"
            )
        return ns.astype(ns.bitcast(bits, "float32"), "float64")
    fmt = FORMATS[name]
    wide = encode_bits(ns, bits, fmt, "nearest_even", "saturate" if saturate else "nonfinite")
    if saturate:
        # An infinity was infinite before this cast: it stays.
        infinite = ((bits >> 16) & 0x8000) | (fmt.infinity_code or 0)
        wide = ns.where((bits & MAGNITUDE) == INFINITY, infinite, wide)
    return ns.bitcast(codes_of(ns, wide, 16), name)
