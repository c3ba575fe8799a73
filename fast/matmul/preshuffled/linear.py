"""`linear` of a preshuffled weight (`fast.matmul.preshuffled.layout`), for torch tensors."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.matmul.preshuffled.ops import LINEAR_SMALL
from reference import Quantized

#: The most rows that read the weight as it is stored, and their dtypes.
MOST_ROWS = 128
INPUTS = (torch.bfloat16, torch.float16)


def linear_small(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype and on its device.

    w: what `ops.preshuffled` makes of a stored weight. On a GPU up to MOST_ROWS rows of bfloat16 or float16 read it as it is
    stored, and the result is within `reference.linear_error_bound` of the exact product, the same bits in every call; others
    are multiplied with what `dequantize` gives in x's dtype: 16-bit rows on Hopper by a kernel that decodes the weight as it
    reads it (where NVRTC is installed), all else by torch. CPU tensors run `reference.linear`. Errors are its.
    Differentiable in x and bias; NotImplementedError where scales require a gradient.
    """
    y: torch.Tensor = run(LINEAR_SMALL, w.scheme, (tuple(w.shape),), (x, w.codes, w.scale, w.zero, bias))
    return y


__all__ = ["INPUTS", "MOST_ROWS", "linear_small"]
