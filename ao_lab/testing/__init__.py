"""Hypothesis strategies for the inputs that break quantization kernels, and comparisons that print bit patterns.

`ao_lab.testing.strategies` has the documentation and an example.
"""

from ao_lab.testing.bits import assert_same_bits, assert_same_quantized
from ao_lab.testing.samples import FINITE_KINDS, KINDS, fill, ties
from ao_lab.testing.strategies import MAXIMA, blocks, float_arrays, shapes

__all__ = [
    "FINITE_KINDS",
    "KINDS",
    "MAXIMA",
    "assert_same_bits",
    "assert_same_quantized",
    "blocks",
    "fill",
    "float_arrays",
    "shapes",
    "ties",
]
