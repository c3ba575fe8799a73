"""Float arithmetic in a stated precision: float32, or every result rounded again to a 16-bit dtype.

Rounding a float32 result to bfloat16 or float16 is what PyTorch's CPU kernels do. For one operation on 16-bit operands it
equals the directly rounded result, because 24 >= 2 * 11 + 2 (Figueroa, SIGNUM Newsletter 30(3), 1995).
"""

from __future__ import annotations

from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import add, bits_of, divide, is_nan, multiply, subtract
from reference.arrays.widen import NAN, widen_float16
from reference.formats.encode_bits import encode_bits, round_to_integer
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
