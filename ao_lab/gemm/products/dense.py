"""Products with the dequantized weight, which take every recipe."""

from __future__ import annotations

import torch

import fast
from ao_lab.gemm.operand import QuantizedWeight


def dequantized(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) or (B, M, K) as its scheme represents it times w (K, N) or (B, K, N), plus bias (N), all in x's dtype, whatever
    theirs are: so are the products that decode codes on the way, of fewer rows."""
    x, dense = rounded(x, w), w.dequantize(x.dtype)
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if x.dim() == 2:
        return torch.mm(x, dense) if bias is None else torch.addmm(bias, x, dense)
    return torch.bmm(x, dense) if bias is None else torch.baddbmm(bias, x, dense)


def rounded(x: torch.Tensor, w: QuantizedWeight) -> torch.Tensor:
    """The input as its scheme represents it; itself where it has none."""
    scheme = w.recipe.activation
    if scheme is None or not sums_along_blocks(w):
        return x
    y = fast.fake_quantize(x, scheme, axis=-1, scales=w.input_scales)
    return torch.where(x.isnan(), x, y) if loses_nan(w) else y


def loses_nan(w: QuantizedWeight) -> bool:
    """Whether an input's NaN has no code: of elements without one under static scales; scales that are found hold it."""
    scheme, scales = w.recipe.activation, w.input_scales
    if scheme is None or scales is None or scales.scale is None:
        return False
    return scheme.format.nan_code is None


def nan_rows(x: torch.Tensor) -> torch.Tensor:
    """Bool (..., M, 1): which rows of x (..., M, K) hold a NaN."""
    return x.isnan().any(-1, keepdim=True)


def sums_along_blocks(w: QuantizedWeight) -> bool:
    """Whether the product's sum, over the axis before the last, runs along the blocks."""
    return w.block_axis == -2


__all__ = ["dequantized", "loses_nan", "nan_rows", "rounded", "sums_along_blocks"]
