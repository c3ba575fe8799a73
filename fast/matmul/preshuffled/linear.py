"""`linear` of a preshuffled weight (`fast.matmul.preshuffled.layout`), for torch tensors."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.ops import LINEAR_SMALL
from reference import Quantized

#: The most rows that read the weight as it is stored, and their dtypes.
MOST_ROWS = 128
#: More than there can be: of weights that any number of rows reads as they are stored.
ALL_ROWS = 2**31 - 1
INPUTS = (torch.bfloat16, torch.float16)


def linear_small(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype and on its device.

    w: what `ops.preshuffled` makes of a stored weight. On a GPU up to MOST_ROWS rows of bfloat16 or float16 read it as it is
    stored, with the same bits in every call, and the result is within `reference.linear_error_bound` of the exact product; so
    it is of the product with what `dequantize` gives in x's dtype for more rows, and for those from 33 on that are faster so.
    These, 16-bit rows on Hopper (where NVRTC is installed), are multiplied by a kernel that decodes the weight as it reads it,
    all else by torch. CPU tensors run `reference.linear`. Errors are its.
    Differentiable in x and bias; NotImplementedError where scales require a gradient.
    """
    y: torch.Tensor = run(LINEAR_SMALL, w.scheme, (tuple(w.shape),), (x, w.codes, w.scale, w.zero, bias))
    return y


def rows_as_stored(w: Quantized, dtype: torch.dtype) -> int:
    """The most rows of a dtype that read a preshuffled matrix (N, K) as it is stored, on the device where it is; 0 for none."""
    if dtype not in INPUTS or not w.codes.is_cuda:
        return 0
    from fast.kernels.linear_small.layout import ArrangedWeight
    from fast.kernels.sm90_w4a16_gemm.host import rows_taken

    form = layout.form_of(w.scheme, w.shape[1])
    arranged = ArrangedWeight(w.codes, w.scale, w.zero, (w.shape[0], w.shape[1]), *form)
    return max(MOST_ROWS, rows_taken(arranged, dtype))


__all__ = ["ALL_ROWS", "INPUTS", "MOST_ROWS", "linear_small", "rows_as_stored"]
