"""The public names of fast and the modules that define them, for type checkers and for `fast.__getattr__`."""

from fast.calibration.hqq import hqq as hqq
from fast.calibration.kv import kv_scales as kv_scales
from fast.calibration.low_rank import low_rank_residual as low_rank_residual
from fast.calibration.rotation import fold_gain as fold_gain
from fast.calibration.rotation import rotate as rotate
from fast.calibration.signround import signround_codes as signround_codes
from fast.calibration.signround import signround_quantize as signround_quantize
from fast.calibration.signround import signround_start as signround_start
from fast.calibration.signround import signround_step as signround_step
from fast.calibration.smoothing import awq_factors as awq_factors
from fast.calibration.smoothing import smoothing_factors as smoothing_factors
from fast.formats import decode as decode
from fast.formats import encode as encode
from fast.formats import pack as pack
from fast.formats import unpack as unpack
from fast.layers.normalize import rms_norm as rms_norm
from fast.layers.normalize import rms_norm_quantize as rms_norm_quantize
from fast.layers.swiglu import swiglu as swiglu
from fast.layers.swiglu import swiglu_quantize as swiglu_quantize
from fast.matmul.linear import linear as linear
from fast.matmul.linear import linear_of_codes as linear_of_codes
from fast.matmul.linear_pair import linear_pair as linear_pair
from fast.matmul.linear_pair import linear_swiglu as linear_swiglu
from fast.matmul.matmul import matmul as matmul
from fast.matmul.matmul import matmul_error_bound as matmul_error_bound
from fast.quantize.fake_quantize import fake_quantize as fake_quantize
from fast.quantize.fake_quantize import fake_quantize_vjp as fake_quantize_vjp
from fast.quantize.quantize import choose_scales as choose_scales
from fast.quantize.quantize import dequantize as dequantize
from fast.quantize.quantize import quantize as quantize
from fast.quantize.rowwise_colwise import quantize_both as quantize_both
from fast.sparsity.compress import compress as compress
from fast.sparsity.compress import decompress as decompress
from fast.sparsity.compress import quantize_compressed as quantize_compressed
from fast.sparsity.linear_sparse import arrange_sparse_metadata as arrange_sparse_metadata
from fast.sparsity.linear_sparse import linear_sparse as linear_sparse
from fast.sparsity.linear_sparse_int4 import linear_sparse_int4 as linear_sparse_int4
from fast.sparsity.prune import compress_transposable as compress_transposable
from fast.sparsity.prune import prune as prune
from fast.sparsity.prune import prune_transposable as prune_transposable
from fast.sparsity.sparsegpt import sparsegpt as sparsegpt

__all__: list[str]
