"""2:4 weights for tests of `SparseQuantizedTensor`, and what the dense tensor of the same scheme is."""

import torch

import fast
from ao_lab import quantized, quantized_compressed
from tests.support.quantized_weights import weight

#: One of each kind: groups, rows, tensor, two-dimensional blocks, zero points, two levels, odd bits, elements as they are.
SPARSE_KINDS = (
    "int8_rowwise", "int8_rowwise_asymmetric", "int4_g32", "int4_g32_asymmetric", "int3_g32", "fp8_tensorwise", "fp8_rowwise",
    "fp8_128x128", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "bfloat16",
)  # fmt: skip


def pruned(*shape, seed=0, dtype=torch.bfloat16):
    w = weight(*shape, seed=seed, dtype=dtype)
    return w.masked_fill(~fast.prune(w), 0)


def pair(scheme, *shape, seed=0):
    """A 2:4 tensor, and the dense tensor that it must equal bit for bit."""
    w = pruned(*shape, seed=seed)
    return quantized_compressed(w, scheme), w if scheme == "bfloat16" else quantized(w, scheme).dequantize()
