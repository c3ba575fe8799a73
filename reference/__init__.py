"""The specification: every format and algorithm of ao_lab, bit for bit, for NumPy, JAX and torch arrays.

Public names are listed in `__all__`. Nothing here imports torch or, before a JAX array arrives, JAX.
`Quantized` and `Scales` are JAX pytrees: see `register_jax` for the one case in which that takes a call.
"""

from reference.arrays.jax_bridge import register_if_imported, register_jax
from reference.calibration.rotation import fold_gain, rotate
from reference.calibration.smoothing import AWQFactors, awq_factors, smoothing_factors
from reference.formats.encode import decode, encode
from reference.formats.formats import FORMATS, Format
from reference.formats.rounding import random_bits
from reference.formats.storage import pack, packed_shape, unpack
from reference.layers.normalize import rms_norm, rms_norm_quantize
from reference.layers.swiglu import swiglu, swiglu_quantize
from reference.matmul.error_bound import matmul_error_bound
from reference.matmul.linear import linear, linear_error_bound
from reference.matmul.matmul import matmul
from reference.quantize.fake_quantize import fake_quantize, fake_quantize_vjp
from reference.quantize.quantize import dequantize, quantize, quantize_both
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized, Scales, tile_scales, untile_scales
from reference.schemes.conventions import load_schemes
from reference.schemes.schemes import SCHEMES, Scale, Scheme, Zero, register
from reference.sparsity.activation import SparseActivation, squared_relu_24
from reference.sparsity.compress import Compressed, compress, decompress
from reference.sparsity.layouts import METADATA_LAYOUTS, MetadataLayout, arrange_metadata, restore_metadata
from reference.sparsity.linear_sparse import linear_sparse, linear_sparse_error_bound
from reference.sparsity.linear_sparse_int4 import linear_sparse_int4
from reference.sparsity.prune import (
    magnitude_scores,
    prune,
    ria_scores,
    square_sums,
    sr_ste_gradient,
    wanda_scores,
)
from reference.sparsity.sparsegpt import SparseGPTResult, sparsegpt
from reference.sparsity.stored_codes import quantize_compressed
from reference.sparsity.transposable import compress_transposable, prune_transposable
from reference.training.grouped import grouped_linear, grouped_linear_vjp
from reference.training.linear import training_linear, training_linear_vjp
from reference.training.recipe import RECIPES, Recipe, load_recipes

load_schemes()
load_recipes()
register_if_imported()

__all__ = [
    "FORMATS",
    "METADATA_LAYOUTS",
    "RECIPES",
    "SCHEMES",
    "AWQFactors",
    "Compressed",
    "Format",
    "MetadataLayout",
    "Quantized",
    "Recipe",
    "Scale",
    "Scales",
    "Scheme",
    "SparseActivation",
    "SparseGPTResult",
    "Zero",
    "arrange_metadata",
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
    "grouped_linear",
    "grouped_linear_vjp",
    "linear",
    "linear_error_bound",
    "linear_sparse",
    "linear_sparse_error_bound",
    "linear_sparse_int4",
    "magnitude_scores",
    "matmul",
    "matmul_error_bound",
    "pack",
    "packed_shape",
    "prune",
    "prune_transposable",
    "quantize",
    "quantize_both",
    "quantize_compressed",
    "random_bits",
    "register",
    "register_jax",
    "restore_metadata",
    "ria_scores",
    "rms_norm",
    "rms_norm_quantize",
    "rotate",
    "smoothing_factors",
    "sparsegpt",
    "square_sums",
    "squared_relu_24",
    "sr_ste_gradient",
    "swiglu",
    "swiglu_quantize",
    "tile_scales",
    "training_linear",
    "training_linear_vjp",
    "unpack",
    "untile_scales",
    "wanda_scores",
]
