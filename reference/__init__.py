"""The specification: every format and algorithm of ao_lab, bit for bit, for NumPy, JAX and torch arrays.

Public names are listed in `__all__`. Nothing here imports torch or, before a JAX array arrives, JAX.
"""

from reference.encode import decode, encode
from reference.formats import FORMATS, Format
from reference.quantize import Quantized, dequantize, quantize
from reference.scales import Scales, choose_scales
from reference.schemes import SCHEMES, Scale, Scheme, Zero, load_schemes

load_schemes()

__all__ = [
    "FORMATS",
    "SCHEMES",
    "Format",
    "Quantized",
    "Scale",
    "Scales",
    "Scheme",
    "Zero",
    "choose_scales",
    "decode",
    "dequantize",
    "encode",
    "quantize",
]
