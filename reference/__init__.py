"""The specification: every format and algorithm of ao_lab, bit for bit, for NumPy, JAX and torch arrays.

Public names are listed in `__all__`. Nothing here imports torch or, before a JAX array arrives, JAX.
`Quantized` and `Scales` are JAX pytrees: see `register_jax` for the one case in which that takes a call.
"""

from reference.both import quantize_both
from reference.compress import Compressed, compress, decompress
from reference.encode import decode, encode
from reference.error_bound import matmul_error_bound
from reference.fake_quantize import fake_quantize, fake_quantize_vjp
from reference.formats import FORMATS, Format
from reference.linear import linear
from reference.linear_bound import linear_error_bound
from reference.matmul import matmul
from reference.normalize import rms_norm, rms_norm_quantize
from reference.pack import pack, packed_shape, unpack
from reference.prune import prune
from reference.pytrees import register_if_imported, register_jax
from reference.quantize import Quantized, dequantize, quantize
from reference.random_bits import random_bits
from reference.scales import Scales, choose_scales
from reference.schemes import SCHEMES, Scale, Scheme, Zero, load_schemes
from reference.swiglu import swiglu, swiglu_quantize
from reference.tiled_scales import tile_scales, untile_scales

load_schemes()
register_if_imported()

__all__ = [
    "FORMATS",
    "SCHEMES",
    "Compressed",
    "Format",
    "Quantized",
    "Scale",
    "Scales",
    "Scheme",
    "Zero",
    "choose_scales",
    "compress",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "linear",
    "linear_error_bound",
    "matmul",
    "matmul_error_bound",
    "pack",
    "packed_shape",
    "prune",
    "quantize",
    "quantize_both",
    "random_bits",
    "register_jax",
    "rms_norm",
    "rms_norm_quantize",
    "swiglu",
    "swiglu_quantize",
    "tile_scales",
    "unpack",
    "untile_scales",
]
