"""`linear_sparse`: inputs times a compressed 2:4 weight, for torch tensors; and metadata as its kernel reads it."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.sparsity.linear_sparse_ops import ARRANGE_SPARSE_METADATA, LINEAR_SPARSE
from reference.arrays.dtypes import DTypeLike, dtype_name
from reference.matmul.exact import RESULTS


def linear_sparse(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: DTypeLike | None = None,
    fast_sums: bool = True,
) -> torch.Tensor:
    """(x @ decompress(values, metadata).T) * x_scale * scale + bias, as in `reference.linear_sparse`, on x's device.

    On a Hopper GPU sparse tensor cores multiply; scales and bias are applied on the way out. metadata may be what `compress`
    made, uint8 (N, K/8), which each call puts in order anew, or what `arrange_sparse_metadata` made of it once, for the dtype
    of values: keep that beside a weight that does not change (there is no cache, which could not see that metadata changed).

    Sums of int8 are exact in int32, results the bits of the reference. Float sums are float32 of the tensor core; those of
    float8 keep about 14 bits there (13 fraction bits below the largest term), with fast_sums in one chain over K, without it in
    chains of 128 elements that are added in float32. Results lie within `reference.linear_sparse_error_bound`. Two calls give
    the same bits. CPU tensors run the reference, exact and slow, and so do GPUs that are not of compute capability 9.0.

    Errors are the reference's; on a GPU ValueError where K is no multiple of 32 (8-bit elements) or 16 (16-bit ones), rows of
    the tensor copy engine being multiples of 16 bytes: multiply by the decompressed weight there. RuntimeError where NVRTC,
    which compiles the kernel at first use, is missing. No gradient: NotImplementedError where one is asked for.
    """
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        out_dtype = getattr(torch, dtype_name(out_dtype, (*RESULTS, "int32"), "out_dtype"))
    operands = (x, values, metadata, bias, x_scale, scale)
    y: torch.Tensor = run(LINEAR_SPARSE, None, (out_dtype, fast_sums), operands)
    return y


def arrange_sparse_metadata(metadata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2:4 metadata (N, ceil(K/8)) of `compress` in the order of `linear_sparse`'s kernel: uint8 (ceil(N/64), panels, bytes).

    dtype: of the values. A permutation of the bytes, filled up to 64 rows and 256 elements of 8 bits (128 of 16); see
    `fast.kernels.sparse_mm.arrange`. Groups that name 0, 0 become 2, 3: their values must be zeros. On metadata's device; the
    host waits for one number. ValueError for 4 bits that name no two elements in order, and for other shapes; TypeError for
    other dtypes.
    """
    made: torch.Tensor = run(ARRANGE_SPARSE_METADATA, None, (dtype,), (metadata,))
    return made


__all__ = ["arrange_sparse_metadata", "linear_sparse"]
