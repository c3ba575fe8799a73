"""The functions of `reference` for torch tensors, under the same names.

CPU tensors run the reference itself (there is no third copy of a rule). CUDA tensors run Triton kernels (`fast.kernels`), the
same bits; where no kernel covers a tensor, the same rules run as torch operations on its device. `fake_quantize` takes part
in autograd. Arrays that are no torch tensors raise TypeError.
"""

from fast.calibration.rotation import fold_gain, rotate
from fast.calibration.smoothing import awq_factors, smoothing_factors
from fast.formats import decode, encode, pack, unpack
from fast.layers.normalize import rms_norm, rms_norm_quantize
from fast.layers.swiglu import swiglu, swiglu_quantize
from fast.matmul.linear import linear, linear_of_codes
from fast.matmul.linear_pair import linear_pair, linear_swiglu
from fast.matmul.matmul import matmul, matmul_error_bound
from fast.quantize.fake_quantize import fake_quantize, fake_quantize_vjp
from fast.quantize.quantize import choose_scales, dequantize, quantize
from fast.quantize.rowwise_colwise import quantize_both
from fast.sparsity.compress import compress, decompress, quantize_compressed
from fast.sparsity.linear_sparse import arrange_sparse_metadata, linear_sparse
from fast.sparsity.linear_sparse_int4 import linear_sparse_int4
from fast.sparsity.prune import compress_transposable, prune, prune_transposable
from fast.sparsity.sparsegpt import sparsegpt

__all__ = [
    "arrange_sparse_metadata",
    "awq_factors",
    "choose_scales",
    "compress",
    "compress_transposable",
    "decode",
    "decompress",
    "dequantize",
    "encode",
    "fake_quantize",
    "fake_quantize_vjp",
    "fold_gain",
    "linear",
    "linear_of_codes",
    "linear_pair",
    "linear_sparse",
    "linear_sparse_int4",
    "linear_swiglu",
    "matmul",
    "matmul_error_bound",
    "pack",
    "prune",
    "prune_transposable",
    "quantize",
    "quantize_both",
    "quantize_compressed",
    "rms_norm",
    "rms_norm_quantize",
    "rotate",
    "smoothing_factors",
    "sparsegpt",
    "swiglu",
    "swiglu_quantize",
    "unpack",
]
