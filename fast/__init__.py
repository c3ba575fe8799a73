"""The functions of `reference` for torch tensors, under the same names.

CPU tensors run the reference itself (there is no third copy of a rule). CUDA tensors run Triton kernels (`fast.kernels`), the
same bits; where no kernel covers a tensor, the same rules run as torch operations on its device. `fake_quantize` takes part
in autograd. Arrays that are no torch tensors raise TypeError.
"""

from fast.both import quantize_both
from fast.compress import compress, decompress
from fast.encode import decode, encode
from fast.fake_quantize import fake_quantize, fake_quantize_vjp
from fast.linear import linear, linear_of_codes
from fast.linear_pair import linear_pair
from fast.linear_swiglu import linear_swiglu
from fast.matmul import matmul, matmul_error_bound
from fast.normalize import rms_norm, rms_norm_quantize
from fast.pack import pack, unpack
from fast.prune import prune
from fast.quantize import choose_scales, dequantize, quantize
from fast.swiglu import swiglu, swiglu_quantize

__all__ = [
    "choose_scales",
    "compress",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "linear",
    "linear_of_codes",
    "linear_pair",
    "linear_swiglu",
    "matmul",
    "matmul_error_bound",
    "pack",
    "prune",
    "quantize",
    "quantize_both",
    "rms_norm",
    "rms_norm_quantize",
    "swiglu",
    "swiglu_quantize",
    "unpack",
]

#: Which file holds the kernel of each function, for reports on tests and benchmarks.
KERNEL_OF = {
    **dict.fromkeys(
        ("choose_scales", "quantize", "dequantize", "fake_quantize", "fake_quantize_vjp"),
        "fast/kernels/blocks.py",
    ),
    **dict.fromkeys(("encode", "decode", "pack", "unpack"), "fast/kernels/pointwise.py"),
    "linear": "fast/kernels/vector_product.py",
    "linear_of_codes": "fast/kernels/code_product.py",
    **dict.fromkeys(("linear_pair", "linear_swiglu"), "fast/kernels/nibble_product.py"),
    "quantize_both": "fast/kernels/both.py",
    **dict.fromkeys(("rms_norm", "rms_norm_quantize"), "fast/kernels/normalize.py"),
    **dict.fromkeys(("swiglu", "swiglu_quantize"), "fast/kernels/swiglu.py"),
}
