"""The functions of `reference` for torch tensors, under the same names.

CPU tensors run the reference itself (there is no third copy of a rule); tensors on another device run the same rules as torch
operations there. `fake_quantize` takes part in autograd. Arrays that are no torch tensors raise TypeError.
"""

from fast.compress import compress, decompress
from fast.encode import decode, encode
from fast.fake_quantize import fake_quantize, fake_quantize_vjp
from fast.matmul import matmul, matmul_error_bound
from fast.pack import pack, unpack
from fast.prune import prune
from fast.quantize import choose_scales, dequantize, quantize

__all__ = [
    "choose_scales",
    "compress",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "matmul",
    "matmul_error_bound",
    "pack",
    "prune",
    "quantize",
    "unpack",
]
